#include "problem_json.hpp"

#include <algorithm>
#include <cstddef>
#include <stdexcept>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../yaml/tree.hpp"
#include "text.hpp"

namespace pipeedge::cli {
namespace {

using yaml::View;

std::string text_or(const View& view, const char* key, const std::string& otherwise) {
  const auto found = view.find(key);
  return found && !found->is_null() ? found->text() : otherwise;
}

std::vector<View> items_of(const View& view, const char* key) {
  const auto found = view.find(key);
  return found ? found->items() : std::vector<View>{};
}

// One value per layer, or none if the key is missing.
std::vector<double> per_layer(const View& view, const char* key, std::size_t layers) {
  const auto found = view.find(key);
  if (!found) return {};
  std::vector<double> values = found->numbers();
  if (!values.empty() && values.size() != layers) {
    found->fail("has " + std::to_string(values.size()) + " values for " + std::to_string(layers) + " layers");
  }
  return values;
}

// Row i has the bids for stages that begin with layer i + 1, by their last layer; null if not taken.
std::vector<double> bids_from(const View& view, std::size_t layers) {
  const auto found = view.find("stage_s");
  if (!found || found->is_null()) return {};
  std::vector<double> bids((layers + 1) * (layers + 1), kInfinity);
  const std::vector<View> rows = found->items();
  if (rows.size() != layers) {
    found->fail("has " + std::to_string(rows.size()) + " rows for " + std::to_string(layers) + " layers");
  }
  for (std::size_t first = 0; first < layers; ++first) {
    const std::vector<View> row = rows[first].items();
    if (row.size() != layers - first) {
      rows[first].fail("has " + std::to_string(row.size()) + " values for " + std::to_string(layers - first) +
                       " stages");
    }
    for (std::size_t i = 0; i < row.size(); ++i) {
      if (!row[i].is_null()) bids[first * (layers + 1) + first + 1 + i] = row[i].number();
    }
  }
  return bids;
}

// Losses of layers; null if not allowed.
std::vector<double> losses_from(const View& view, const char* key, std::size_t layers) {
  const auto found = view.find(key);
  if (!found || found->is_null()) return {};
  std::vector<double> losses;
  for (const View& item : found->items()) losses.push_back(item.is_null() ? kInfinity : item.number());
  if (losses.size() != layers) {
    found->fail("has " + std::to_string(losses.size()) + " values for " + std::to_string(layers) + " layers");
  }
  return losses;
}

DeviceType type_from(const View& view, std::size_t layers) {
  DeviceType type;
  type.name = view.at("name").text();
  type.mem_bytes = view.at("mem_bytes").number();
  type.bw_bytes_per_s = view.at("bw_bytes_per_s").number();
  type.weight_bytes = per_layer(view, "weight_bytes", layers);
  type.time_s = per_layer(view, "time_s", layers);
  if (type.time_s.empty()) type.time_s.assign(layers, 0);
  type.receive_s = per_layer(view, "receive_s", layers);
  type.send_s = per_layer(view, "send_s", layers);
  type.activation_bytes = per_layer(view, "activation_bytes", layers);
  type.feed_s = number_or(view, "feed_s", 0);
  type.collect_s = number_or(view, "collect_s", 0);
  type.input_send_s = number_or(view, "input_send_s", 0);
  type.output_receive_s = number_or(view, "output_receive_s", 0);
  type.stage_s = bids_from(view, layers);
  type.busy_w = number_or(view, "busy_w", -1);
  type.idle_w = number_or(view, "idle_w", 0);
  return type;
}

// Indices by name; names are unique.
class Names {
 public:
  void add(const View& entry, const std::string& name) {
    if (!indices_.emplace(name, static_cast<int>(indices_.size())).second) {
      entry.fail("the name " + yaml::printable(name) + " comes twice");
    }
  }
  int find(const View& view) const {
    const auto found = indices_.find(view.text());
    if (found == indices_.end()) view.fail("there is no " + yaml::printable(view.text()) + " in the problem");
    return found->second;
  }

 private:
  std::unordered_map<std::string, int> indices_;
};

void write_known(JsonWriter& json, const char* key, const std::vector<double>& values) {
  if (!values.empty()) json.key(key).numbers(values);
}

void write_type(JsonWriter& json, const DeviceType& type, const yaml::TypeNotes& notes) {
  json.open('{');
  json.key("name").value(type.name);
  json.key("dtype").value(notes.dtype);
  if (notes.threads > 0) json.key("threads").value(notes.threads);
  if (!notes.kernels.empty()) json.key("kernels").value(notes.kernels);
  write_known(json, "tokens", notes.tokens);
  json.key("mem_bytes").value(type.mem_bytes);
  json.key("bw_bytes_per_s").value(type.bw_bytes_per_s);
  write_known(json, "weight_bytes", type.weight_bytes);
  json.key("time_s").numbers(type.time_s);
  write_known(json, "receive_s", type.receive_s);
  write_known(json, "send_s", type.send_s);
  write_known(json, "activation_bytes", type.activation_bytes);
  write_known(json, "loss", notes.loss);
  json.key("feed_s").value(type.feed_s);
  json.key("collect_s").value(type.collect_s);
  if (type.input_send_s > 0) json.key("input_send_s").value(type.input_send_s);
  if (type.output_receive_s > 0) json.key("output_receive_s").value(type.output_receive_s);
  if (type.busy_w >= 0) json.key("busy_w").value(type.busy_w);
  if (type.idle_w > 0) json.key("idle_w").value(type.idle_w);
  if (type.bids()) {
    const int layers = static_cast<int>(type.time_s.size());
    json.key("stage_s").open('[');
    for (int first = 0; first < layers; ++first) {
      std::vector<double> row;
      for (int last = first + 1; last <= layers; ++last) row.push_back(type.bid(first, last));
      json.numbers(row);
    }
    json.close(']');
  }
  json.close('}');
}

}  // namespace

double number_or(const View& view, const char* key, double otherwise) {
  const auto found = view.find(key);
  return found && !found->is_null() ? found->number() : otherwise;
}

NamedProblem read_problem(const std::string& text, const std::string& name) {
  const yaml::Document document = yaml::parse(text, name, kLargestInProblem);
  return problem_from(View(document));
}

NamedProblem problem_from(const View& root) {
  NamedProblem named;
  named.model = text_or(root, "model", "model");
  named.dtype = text_or(root, "dtype", "");
  Problem& problem = named.assembly.problem;
  problem.model.mem_bytes = root.at("weight_bytes").numbers();
  const std::size_t layers = problem.model.mem_bytes.size();
  problem.model.elements_in = root.at("elements_in").number();
  problem.model.elements_out = root.at("elements_out").numbers();
  if (const auto shared = root.find("shared_with")) {
    for (const double layer : shared->whole_numbers()) {
      problem.model.shared_with.push_back(static_cast<int>(std::min(layer, 1e9)) - 1);
    }
  }
  problem.batch_size = root.at("batch_size").number();
  problem.element_bytes = root.at("element_bytes").number();
  problem.input_bytes = number_or(root, "input_bytes", -1);
  problem.output_bytes = number_or(root, "output_bytes", -1);
  problem.buffers_in = root.at("buffers_in").number();
  problem.buffers_out = root.at("buffers_out").number();
  Names types;
  for (const View& entry : root.at("types").items()) {
    problem.types.push_back(type_from(entry, layers));
    types.add(entry, problem.types.back().name);
    yaml::TypeNotes notes;
    notes.dtype = text_or(entry, "dtype", "");
    notes.threads = number_or(entry, "threads", 0);
    notes.kernels = text_or(entry, "kernels", "");
    if (const auto tokens = entry.find("tokens")) notes.tokens = tokens->numbers();
    notes.loss = losses_from(entry, "loss", layers);
    named.assembly.notes.push_back(std::move(notes));
  }
  Names hosts;
  for (const View& entry : root.at("hosts").items()) {
    problem.hosts.push_back({entry.at("name").text(), types.find(entry.at("type"))});
    hosts.add(entry, problem.hosts.back().name);
  }
  if (problem.hosts.empty()) root.at("hosts").fail("lists no host");
  for (const View& entry : items_of(root, "links")) {
    problem.links.push_back({hosts.find(entry.at("from")), hosts.find(entry.at("to")),
                             entry.at("bw_bytes_per_s").number(), number_or(entry, "latency_s", 0)});
  }
  const auto data_host = root.find("data_host");
  if (data_host && !data_host->is_null()) problem.data_host = hosts.find(*data_host);
  for (const View& entry : items_of(root, "left_out")) {
    named.assembly.left_out.push_back({entry.at("host").text(), entry.at("type").text(), entry.at("why").text()});
  }
  for (const View& entry : items_of(root, "warnings")) named.assembly.warnings.push_back(entry.text());
  try {
    validate(problem);
  } catch (const std::invalid_argument& error) {
    root.fail(error.what());
  }
  return named;
}

std::string problem_json(const NamedProblem& named) {
  JsonWriter json;
  write_problem(json, named);
  return json.text();
}

void write_problem(JsonWriter& json, const NamedProblem& named) {
  const Problem& problem = named.assembly.problem;
  json.open('{');
  json.key("model").value(named.model);
  json.key("dtype").value(named.dtype);
  json.key("batch_size").value(problem.batch_size);
  json.key("element_bytes").value(problem.element_bytes);
  json.key("elements_in").value(problem.model.elements_in);
  json.key("elements_out").numbers(problem.model.elements_out);
  if (problem.input_bytes >= 0) json.key("input_bytes").value(problem.input_bytes);
  if (problem.output_bytes >= 0) json.key("output_bytes").value(problem.output_bytes);
  json.key("weight_bytes").numbers(problem.model.mem_bytes);
  if (!problem.model.shared_with.empty()) {
    json.key("shared_with").open('[');
    for (const int layer : problem.model.shared_with) json.value(layer + 1);
    json.close(']');
  }
  json.key("buffers_in").value(problem.buffers_in);
  json.key("buffers_out").value(problem.buffers_out);
  json.key("types").open('[');
  for (std::size_t t = 0; t < problem.types.size(); ++t) {
    write_type(json, problem.types[t], named.assembly.notes[t]);
  }
  json.close(']');
  json.key("hosts").open('[');
  for (const Host& host : problem.hosts) {
    json.open('{').key("name").value(host.name);
    json.key("type").value(problem.types[static_cast<std::size_t>(host.type)].name).close('}');
  }
  json.close(']');
  json.key("links").open('[');
  for (const Link& link : problem.links) {
    json.open('{');
    json.key("from").value(problem.hosts[static_cast<std::size_t>(link.from)].name);
    json.key("to").value(problem.hosts[static_cast<std::size_t>(link.to)].name);
    json.key("bw_bytes_per_s").value(link.bw_bytes_per_s);
    json.key("latency_s").value(link.latency_s);
    json.close('}');
  }
  json.close(']');
  if (problem.data_host >= 0) {
    json.key("data_host").value(problem.hosts[static_cast<std::size_t>(problem.data_host)].name);
  }
  json.key("left_out").open('[');
  for (const yaml::LeftOut& host : named.assembly.left_out) {
    json.open('{').key("host").value(host.host).key("type").value(host.type).key("why").value(host.why).close(
        '}');
  }
  json.close(']');
  json.key("warnings").open('[');
  for (const std::string& warning : named.assembly.warnings) json.value(warning);
  json.close(']');
  json.close('}');
}

}  // namespace pipeedge::cli
