#include "files_json.hpp"

#include <optional>
#include <vector>

#include "text.hpp"

namespace pipeedge::cli {
namespace {

using yaml::Node;
using yaml::View;

// A value that no field stands for, by YAML's rules.
void write_plain(JsonWriter& json, const View& view) {
  switch (view.kind()) {
    case Node::Kind::kNull: json.null(); return;
    case Node::Kind::kSequence:
      json.open('[');
      for (const View& item : view.items()) write_plain(json, item);
      json.close(']');
      return;
    case Node::Kind::kMap:
      json.open('{');
      for (const auto& [key, value] : view.entries()) {
        json.key(key);
        write_plain(json, value);
      }
      json.close('}');
      return;
    case Node::Kind::kScalar: break;
  }
  const std::string text = view.text();
  if (!view.is_plain()) {
    json.value(text);
  } else if (text.find_first_not_of("0123456789") == text.npos && (text.size() == 1 || text.front() != '0')) {
    json.whole_number(text);  // of any size, such as a serial number
  } else if (const auto number = view.number_if_any(-yaml::kLargestNumber)) {
    json.value(*number);
  } else if (text == "true" || text == "false") {
    json.value(text == "true");
  } else {
    json.value(text);
  }
}

void write_other(JsonWriter& json, const yaml::OtherKeys& other) {
  if (other.empty()) return;
  json.key("extra").open('{');
  for (const auto& [key, value] : other) {
    json.key(key);
    write_plain(json, value);
  }
  json.close('}');
}

void write_numbers(JsonWriter& json, const char* key, const std::vector<double>& values) {
  if (!values.empty()) json.key(key).numbers(values);
}

void write_number(JsonWriter& json, const char* key, const std::optional<double>& value) {
  if (value) json.key(key).value(*value);
}

void write_model(JsonWriter& json, const yaml::ModelSpec& spec) {
  json.key(spec.name).open('{');
  json.key("mem_bytes").numbers(spec.model.mem_bytes);
  json.key("elements_in").value(spec.model.elements_in);
  json.key("elements_out").numbers(spec.model.elements_out);
  if (!spec.model.shared_with.empty()) {
    std::vector<double> shared;  // counted from 1, and 0 for none
    for (const int layer : spec.model.shared_with) shared.push_back(layer == Model::kUnshared ? 0 : layer + 1);
    json.key("shared_with").numbers(shared);
  }
  if (spec.tokens > 0) {
    json.key("tokens").value(spec.tokens);
    json.key("elements_in_per_token").value(spec.elements_in_per_token);
    json.key("elements_out_per_token").numbers(spec.elements_out_per_token);
  }
  if (!spec.agreement_at_bits.empty()) {
    json.key("agreement_at_bits").open('{');
    for (const auto& [bits, agreement] : spec.agreement_at_bits) json.key(std::to_string(bits)).numbers(agreement);
    json.close('}');
  }
  if (spec.context > 0) json.key("context").value(spec.context);
  write_numbers(json, "windows", spec.windows);
  write_other(json, spec.other);
  json.close('}');
}

// What the entries of all sentence lengths have.
void write_times(JsonWriter& json, const yaml::Profile& profile) {
  json.key("time_s").numbers(profile.time_s);
  write_numbers(json, "spread_s", profile.spread_s);
  write_numbers(json, "receive_s", profile.receive_s);
  write_numbers(json, "send_s", profile.send_s);
  write_numbers(json, "activation_bytes", profile.activation_bytes);
  if (profile.tokens > 0) json.key("tokens").value(profile.tokens);
  write_other(json, profile.other);
}

void write_handling(JsonWriter& json, const yaml::Handling& handling) {
  json.open('{');
  json.key("receive_s").value(handling.receive_s);
  json.key("receive_s_per_byte").value(handling.receive_s_per_byte);
  json.key("send_s").value(handling.send_s);
  json.key("send_s_per_byte").value(handling.send_s_per_byte);
  write_other(json, handling.other);
  json.close('}');
}

void write_steps(JsonWriter& json, const yaml::StepCosts& steps) {
  json.key("steps").open('{');
  json.key("fixed_s").numbers(steps.fixed_s);
  json.key("start_s").numbers(steps.start_s);
  json.key("row_s").numbers(steps.row_s);
  json.key("position_s").numbers(steps.position_s);
  json.key("chunk_position_s").numbers(steps.chunk_position_s);
  write_numbers(json, "many_start_s", steps.many_start_s);
  write_numbers(json, "many_row_s", steps.many_row_s);
  json.key("cache_bytes").numbers(steps.cache_bytes);
  json.key("ends").open('{');
  json.key("fixed_s").value(steps.ends.fixed_s);
  json.key("start_s").value(steps.ends.start_s);
  json.key("row_s").value(steps.ends.row_s);
  json.key("feed_s").value(steps.ends.feed_s);
  json.key("feed_row_s").value(steps.ends.feed_row_s);
  json.key("memory_bytes").value(steps.ends.mem_bytes);
  json.close('}');
  write_number(json, "residual", steps.residual);
  write_number(json, "variation", steps.variation);
  write_number(json, "load_s_per_byte", steps.load_s_per_byte);
  json.close('}');
}

void write_profile(JsonWriter& json, const yaml::Profile& profile) {
  json.open('{');
  json.key("batch_size").value(profile.batch_size);
  json.key("dtype").value(profile.dtype);
  write_times(json, profile);
  write_numbers(json, "weight_bytes", profile.weight_bytes);
  write_number(json, "feed_s", profile.feed_s);
  write_number(json, "collect_s", profile.collect_s);
  write_number(json, "overhead_s", profile.overhead_s);
  write_number(json, "agreement", profile.agreement);
  write_number(json, "process_bytes", profile.process_bytes);
  write_number(json, "busy_w", profile.busy_w);
  if (profile.threads > 0) json.key("threads").value(profile.threads);
  if (!profile.kernels.empty()) json.key("kernels").value(profile.kernels);
  if (!profile.handling.empty()) {
    json.key("handling").open('{');
    for (const auto& [transport, handling] : profile.handling) {
      json.key(transport);
      write_handling(json, handling);
    }
    json.close('}');
  }
  if (profile.steps) write_steps(json, *profile.steps);
  if (!profile.lengths.empty()) {
    json.key("lengths").open('[');
    for (const yaml::Profile& other : profile.lengths) {
      json.open('{');
      write_times(json, other);
      json.close('}');
    }
    json.close(']');
  }
  json.close('}');
}

void write_type(JsonWriter& json, const yaml::TypeSpec& type) {
  json.key(type.name).open('{');
  json.key("mem_bytes").value(type.mem_bytes);
  json.key("bw_bytes_per_s").value(type.bw_bytes_per_s);
  write_number(json, "busy_w", type.busy_w);
  write_number(json, "idle_w", type.idle_w);
  json.key("profiles").open('{');
  for (const yaml::ModelProfiles& entry : type.models) {
    json.key(entry.model).open('[');
    for (const yaml::Profile& profile : entry.profiles) write_profile(json, profile);
    json.close(']');
  }
  json.close('}');
  write_other(json, type.other);
  json.close('}');
}

void write_links(JsonWriter& json, const yaml::HostNeighbors& host) {
  json.key(host.from).open('{');
  for (const yaml::NeighborSpec& link : host.links) {
    json.key(link.to).open('{');
    json.key("bw_bytes_per_s").value(link.bw_bytes_per_s);
    json.key("latency_s").value(link.latency_s);
    write_other(json, link.other);
    json.close('}');
  }
  json.close('}');
}

void write_hosts(JsonWriter& json, const yaml::TypeHosts& type) {
  json.key(type.type).open('[');
  for (const std::string& host : type.hosts) json.value(host);
  json.close(']');
}

template <typename Entry, typename Write>
void write_file(JsonWriter& json, const char* key, const std::optional<yaml::SpecFile<Entry>>& file, Write write) {
  if (!file) return;
  json.key(key).open('{');
  for (const Entry& entry : file->entries) write(json, entry);
  json.close('}');
}

}  // namespace

std::string files_json(const SpecFiles& files) {
  JsonWriter json;
  json.open('{');
  write_file(json, "models", files.models, write_model);
  write_file(json, "device_types", files.types, write_type);
  write_file(json, "devices", files.devices, write_hosts);
  write_file(json, "neighbors", files.neighbors, write_links);
  json.close('}');
  return json.text();
}

}  // namespace pipeedge::cli
