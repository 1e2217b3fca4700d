#include "specs.hpp"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <set>
#include <unordered_map>

#include "wording.hpp"

namespace pipeedge::yaml {
namespace {

std::string layers_text(double layers) { return number_text(layers) + (layers == 1 ? " layer" : " layers"); }

// The entries of `view` whose keys are not in `known`.
OtherKeys others(const View& view, const std::set<std::string_view>& known) {
  OtherKeys found;
  for (auto& [key, value] : view.entries()) {
    if (known.count(key) == 0) found.emplace_back(key, value);
  }
  return found;
}

// The earlier layer with the same weights as each layer; in the file counted from 1, and 0 if there is none.
std::vector<int> shared_layers(const View& view, std::size_t count) {
  std::vector<int> shared;
  for (const double layer : view.whole_numbers()) {
    shared.push_back(static_cast<int>(std::min(layer, 1e9)) - 1);
  }
  if (shared.size() != count) {
    view.fail("has " + plural(shared.size(), "value") + " for " + plural(count, "layer"));
  }
  std::set<int> named;
  for (std::size_t l = 0; l < count; ++l) {
    const int twin = shared[l];
    if (twin == Model::kUnshared) continue;
    if (twin >= static_cast<int>(l) || !named.insert(twin).second) {
      view.fail("layer " + std::to_string(l + 1) + " shares the weights of layer " + std::to_string(twin + 1) +
                "; name the nearest layer before it that has them, or 0");
    }
  }
  return shared;
}

// Agreement at each cut between two layers, by bits per value.
std::map<int, std::vector<double>> agreement_from(const View& view, std::size_t layers) {
  std::map<int, std::vector<double>> found;
  for (const auto& [key, cuts] : view.entries()) {
    const std::vector<std::string> known{"2", "3", "4", "5", "6", "7", "8", "16"};
    if (std::find(known.begin(), known.end(), key) == known.end()) {
      view.fail("has " + printable(key) + " bits; links have 2 to 8 or 16 bits");
    }
    std::vector<double>& agreement = found[std::stoi(std::string(key))];
    agreement = cuts.numbers();
    if (agreement.size() + 1 != layers) {
      cuts.fail("has " + plural(agreement.size(), "value") + " for " + plural(layers > 0 ? layers - 1 : 0, "cut") +
                " between two layers");
    }
    for (const double part : agreement) {
      if (part > 1) cuts.fail("is a part of the items, at most 1");
    }
  }
  return found;
}

ModelSpec model_from(const std::string& name, const View& view) {
  ModelSpec spec;
  spec.name = name;
  spec.line = view.line();
  const double layers = view.at("layers").whole_number();
  const View memory = view.at("mem_MB");
  spec.model.mem_bytes = memory.numbers();
  if (static_cast<double>(spec.model.mem_bytes.size()) != layers) {
    memory.fail("has " + plural(spec.model.mem_bytes.size(), "value") + " for " + layers_text(layers));
  }
  for (double& bytes : spec.model.mem_bytes) bytes *= kBytesPerMB;
  spec.model.elements_in = view.at("parameters_in").whole_number();

  // A shorter list describes a block of layers that repeats.
  const View out = view.at("parameters_out");
  const std::vector<double> block = out.whole_numbers();
  const std::size_t count = spec.model.mem_bytes.size();
  if (block.empty() ? count != 0 : count % block.size() != 0 || block.size() > count) {
    out.fail("has " + plural(block.size(), "value") + " for " + layers_text(layers) +
             "; give one a layer, or a block of layers that repeats a whole number of times");
  }
  spec.model.elements_out.reserve(count);
  for (std::size_t i = 0; i < count; ++i) spec.model.elements_out.push_back(block[i % block.size()]);
  if (const auto shared = view.find("shared_with")) spec.model.shared_with = shared_layers(*shared, count);
  std::set<std::string_view> known{"layers",         "mem_MB",      "parameters_in",
                                   "parameters_out", "shared_with", "agreement_at_bits"};
  if (const auto agreement = view.find("agreement_at_bits")) {
    spec.agreement_at_bits = agreement_from(*agreement, count);
  }
  if (const auto tokens = view.find("tokens")) {
    spec.tokens = tokens->whole_number(1);
    spec.elements_in_per_token = view.at("parameters_in_per_token").whole_number();
    const View per_token = view.at("parameters_out_per_token");
    spec.elements_out_per_token = per_token.whole_numbers();
    if (spec.elements_out_per_token.size() != count) {
      per_token.fail("has " + plural(spec.elements_out_per_token.size(), "value") + " for " + layers_text(layers));
    }
    known.insert({"tokens", "parameters_in_per_token", "parameters_out_per_token"});
  }
  if (const auto context = view.find("context")) {
    spec.context = context->whole_number(1);
    known.insert("context");
    if (const auto windows = view.find("windows")) {
      spec.windows = windows->whole_numbers();
      known.insert("windows");
      if (spec.windows.size() != count) {
        windows->fail("has " + plural(spec.windows.size(), "value") + " for " + layers_text(layers));
      }
    }
  }
  spec.other = others(view, known);
  return spec;
}

// Keys of a profile that the entries of other lengths also have.
const std::set<std::string_view> kLengthKeys{"tokens", "time_s", "spread_s", "receive_s", "send_s", "activations_MB"};

// Numbers of each layer under `key` of a profile, multiplied by `unit`; empty if the key is missing.
std::vector<double> per_layer(const View& view, const char* key, std::size_t layers, double unit = 1) {
  const auto found = view.find(key);
  if (!found) return {};
  std::vector<double> values = found->numbers();
  if (values.size() != layers) {
    found->fail("has " + plural(values.size(), "value") + ", time_s has " + std::to_string(layers));
  }
  for (double& value : values) value *= unit;
  return values;
}

std::optional<double> seconds_of(const View& view, const char* key) {
  const auto found = view.find(key);
  return found ? std::optional<double>(found->number()) : std::nullopt;
}

// Reads what the entry of any sentence length has; the caller sets the rest.
Profile times_from(const View& view) {
  Profile profile;
  const View times = view.at("time_s");
  profile.line = times.line();
  profile.time_s = times.numbers();
  const std::size_t layers = profile.time_s.size();
  profile.spread_s = per_layer(view, "spread_s", layers);
  profile.receive_s = per_layer(view, "receive_s", layers);
  profile.send_s = per_layer(view, "send_s", layers);
  profile.activation_bytes = per_layer(view, "activations_MB", layers, kBytesPerMB);
  return profile;
}

void read_lengths(const View& lengths, Profile& profile) {
  if (profile.tokens == 0) lengths.fail("needs tokens beside it, the length of time_s");
  std::set<double> seen{profile.tokens};
  for (const View& entry : lengths.items()) {
    const double tokens = entry.at("tokens").whole_number(1);
    if (!seen.insert(tokens).second) {
      entry.fail("is a second entry for " + number_text(tokens) + " tokens; keep one");
    }
    Profile other = times_from(entry);
    other.tokens = tokens;
    if (other.time_s.size() != profile.time_s.size()) {
      entry.at("time_s").fail("has " + plural(other.time_s.size(), "value") + ", that of " +
                              number_text(profile.tokens) + " tokens has " + std::to_string(profile.time_s.size()));
    }
    other.other = others(entry, kLengthKeys);
    profile.lengths.push_back(std::move(other));
  }
}

Handling handling_from(const View& view) {
  Handling handling;
  handling.receive_s = view.at("receive_s").number();
  handling.receive_s_per_byte = view.at("receive_s_per_MB").number() / kBytesPerMB;
  handling.send_s = view.at("send_s").number();
  handling.send_s_per_byte = view.at("send_s_per_MB").number() / kBytesPerMB;
  handling.other = others(view, {"receive_s", "receive_s_per_MB", "send_s", "send_s_per_MB"});
  return handling;
}

StepCosts steps_from(const View& view, std::size_t layers) {
  StepCosts steps;
  const auto list = [&](const char* key) {
    const View found = view.at(key);
    std::vector<double> values = found.numbers();
    if (values.size() != layers) {
      found.fail("has " + plural(values.size(), "value") + ", time_s has " + std::to_string(layers));
    }
    return values;
  };
  steps.fixed_s = list("fixed_s");
  steps.start_s = list("start_s");
  steps.row_s = list("row_s");
  steps.position_s = list("position_s");
  steps.chunk_position_s = list("chunk_position_s");
  steps.cache_bytes = list("cache_bytes");
  steps.many_start_s = per_layer(view, "many_start_s", layers);
  steps.many_row_s = per_layer(view, "many_row_s", layers);
  if (steps.many_start_s.empty() != steps.many_row_s.empty()) {
    view.fail(steps.many_row_s.empty() ? "has many_start_s and needs many_row_s" : "has many_row_s and needs many_start_s");
  }
  const View ends = view.at("ends");
  steps.ends.fixed_s = ends.at("fixed_s").number();
  steps.ends.start_s = ends.at("start_s").number();
  steps.ends.row_s = ends.at("row_s").number();
  steps.ends.feed_s = ends.at("feed_s").number();
  steps.ends.feed_row_s = ends.at("feed_row_s").number();
  steps.ends.mem_bytes = ends.at("mem_MB").number() * kBytesPerMB;
  steps.residual = seconds_of(view, "residual");
  steps.variation = seconds_of(view, "variation");
  if (const auto load = seconds_of(view, "load_s_per_MB")) steps.load_s_per_byte = *load / kBytesPerMB;
  return steps;
}

// Reads keys that other tools may have used for something else, which then remain among the other keys.
void read_notes(const View& view, Profile& profile, std::set<std::string_view>& known) {
  const auto number = [&](const char* key, double unit) {
    const auto found = view.find(key);
    std::optional<double> value = found ? found->number_if_any() : std::nullopt;
    if (value) {
      *value *= unit;
      known.insert(key);
    }
    return value;
  };
  profile.agreement = number("agreement", 1);
  profile.process_bytes = number("process_MB", kBytesPerMB);
  profile.busy_w = number("busy_W", 1);
  if (const auto threads = view.find("threads")) {
    const double value = threads->number_if_any(1).value_or(0);
    if (value > 0 && value == std::floor(value)) {
      profile.threads = value;
      known.insert("threads");
    }
  }
  if (const auto kernels = view.find("kernels")) {
    for (const char* name : {"onednn", "torch", "emulated"}) {
      if (!kernels->is_text(name)) continue;
      profile.kernels = name;
      known.insert("kernels");
    }
  }
}

Profile profile_from(const View& view) {
  const double batch_size = view.at("batch_size").whole_number(1);
  const std::string dtype = view.at("dtype").text();
  Profile profile = times_from(view);
  profile.batch_size = batch_size;
  profile.dtype = dtype;
  profile.weight_bytes = per_layer(view, "weights_MB", profile.time_s.size(), kBytesPerMB);
  profile.feed_s = seconds_of(view, "feed_s");
  profile.collect_s = seconds_of(view, "collect_s");
  profile.overhead_s = seconds_of(view, "overhead_s");
  if (const auto handling = view.find("handling")) {
    for (const auto& [transport, entry] : handling->entries()) {
      profile.handling.emplace(transport, handling_from(entry));
    }
  }
  if (const auto tokens = view.find("tokens")) profile.tokens = tokens->whole_number(1);
  if (const auto lengths = view.find("lengths")) read_lengths(*lengths, profile);
  std::set<std::string_view> known = kLengthKeys;
  known.insert({"batch_size", "dtype", "weights_MB", "feed_s", "collect_s", "overhead_s", "handling", "lengths"});
  if (const auto steps = view.find("steps")) {
    profile.steps = steps_from(*steps, profile.time_s.size());
    known.insert("steps");
  }
  read_notes(view, profile, known);
  profile.other = others(view, known);
  return profile;
}

TypeSpec type_from(const std::string& name, const View& view) {
  TypeSpec spec;
  spec.name = name;
  spec.bw_bytes_per_s = view.at("bw_Mbps").number() * kBytesPerSecondPerMbps;
  spec.mem_bytes = view.at("mem_MB").number() * kBytesPerMB;
  for (const auto& [model, profiles] : view.at("model_profiles").entries()) {
    std::vector<Profile> known;
    for (const View& entry : profiles.items()) {
      Profile profile = profile_from(entry);
      for (const Profile& other : known) {
        if (other.batch_size == profile.batch_size && short_dtype(other.dtype) == short_dtype(profile.dtype)) {
          entry.fail("is a second profile for batch size " + number_text(profile.batch_size) + " and dtype " +
                     printable(short_dtype(profile.dtype)) + "; keep one");
        }
      }
      known.push_back(std::move(profile));
    }
    spec.models.push_back({model, std::move(known)});
  }
  std::set<std::string_view> known{"bw_Mbps", "mem_MB", "model_profiles"};
  const auto watts = [&](const char* key) {
    const auto found = view.find(key);
    std::optional<double> value = found ? found->number_if_any() : std::nullopt;
    if (value) known.insert(key);
    return value;
  };
  spec.busy_w = watts("busy_W");
  spec.idle_w = watts("idle_W");
  spec.other = others(view, known);
  return spec;
}

using Shared = std::shared_ptr<const Document>;

Shared shared(Document document) { return std::make_shared<const Document>(std::move(document)); }

// `view`: where the entries stand in `document`.
DeviceTypes types_at(const Shared& document, const View& view) {
  DeviceTypes types{document, {}};
  for (const auto& [name, entry] : view.entries()) types.entries.push_back(type_from(name, entry));
  return types;
}

Devices devices_at(const Shared& document, const View& view) {
  Devices devices{document, {}};
  std::unordered_map<std::string, std::string> seen;  // host -> type
  for (const auto& [type, hosts] : view.entries()) {
    TypeHosts entry{type, {}};
    for (const View& item : hosts.items()) {
      const std::string host = item.text();
      if (host.empty()) item.fail("is an empty host name");
      if (printable(host, host.size() + 1) != host) item.fail("is a host name with a control character in it");
      const auto [other, fresh] = seen.emplace(host, type);
      if (!fresh) {
        item.fail("the host " + printable(host) + " is listed twice" +
                  (other->second == type ? "" : "; it stands under " + printable(other->second) + " already"));
      }
      entry.hosts.push_back(host);
    }
    devices.entries.push_back(std::move(entry));
  }
  return devices;
}

}  // namespace

std::string_view short_dtype(std::string_view dtype) {
  constexpr std::string_view prefix = "torch.";
  return dtype.substr(0, prefix.size()) == prefix ? dtype.substr(prefix.size()) : dtype;
}

Models models_from(Document document) {
  Models models{shared(std::move(document)), {}};
  for (const auto& [name, view] : View(*models.document).entries()) {
    models.entries.push_back(model_from(name, view));
  }
  return models;
}

DeviceTypes device_types_from(Document document) {
  const Shared whole = shared(std::move(document));
  return types_at(whole, View(*whole));
}

Devices devices_from(Document document) {
  const Shared whole = shared(std::move(document));
  return devices_at(whole, View(*whole));
}

Neighbors neighbors_from(Document document) {
  Neighbors neighbors{shared(std::move(document)), {}};
  for (const auto& [from, view] : View(*neighbors.document).entries()) {
    HostNeighbors entry{from, {}};
    for (const auto& [to, link] : view.entries()) {
      NeighborSpec spec{to, link.at("bw_Mbps").number() * kBytesPerSecondPerMbps, 0, {}};
      if (const auto latency = link.find("latency_s")) spec.latency_s = latency->number();
      spec.other = others(link, {"bw_Mbps", "latency_s"});
      entry.links.push_back(std::move(spec));
    }
    neighbors.entries.push_back(std::move(entry));
  }
  return neighbors;
}

Cluster read_cluster(const std::string& file) {
  const Shared document = shared(read_document(file));
  const auto part = [&](const char* key, auto at) {
    const View entry = View(*document).at(key);
    if (entry.kind() != Node::Kind::kScalar) return at(document, entry);
    const std::string named = (std::filesystem::path(file).parent_path() / entry.text()).string();
    const Shared other = shared(read_document(named));
    return at(other, View(*other));
  };
  return {part("device_types", types_at), part("devices", devices_at)};
}

}  // namespace pipeedge::yaml
