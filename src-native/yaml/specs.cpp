#include "specs.hpp"

#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <set>
#include <system_error>
#include <unordered_map>
#include <utility>

#include "../core/lengths.hpp"
#include "../core/number_types.hpp"

namespace pipeedge::yaml {
namespace {

std::string plural(std::size_t count, const char* one) {
  return std::to_string(count) + " " + one + (count == 1 ? "" : "s");
}

// Whole numbers, limited to kLargestNumber by the reader.
std::string number_text(double value) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.0f", value);
  return text.data();
}

std::string layers_text(double layers) {
  return number_text(layers) + (layers == 1 ? " layer" : " layers");
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
  if (const auto shared = view.find("shared_with")) {
    // Counted from 1, and 0 for a layer with weights of its own.
    for (const double layer : shared->whole_numbers()) {
      spec.model.shared_with.push_back(static_cast<int>(std::min(layer, 1e9)) - 1);
    }
    if (spec.model.shared_with.size() != count) {
      shared->fail("has " + plural(spec.model.shared_with.size(), "value") + " for " + layers_text(layers));
    }
    std::set<int> named;
    for (std::size_t l = 0; l < count; ++l) {
      const int twin = spec.model.shared_with[l];
      if (twin == Model::kUnshared) continue;
      if (twin >= static_cast<int>(l) || !named.insert(twin).second) {
        shared->fail("layer " + std::to_string(l + 1) + " shares the weights of layer " + std::to_string(twin + 1) +
                     "; name the nearest layer before it that has them, or 0");
      }
    }
  }
  if (const auto tokens = view.find("tokens")) {
    spec.tokens = tokens->whole_number(1);
    spec.elements_in_per_token = view.at("parameters_in_per_token").whole_number();
    const View per_token = view.at("parameters_out_per_token");
    spec.elements_out_per_token = per_token.whole_numbers();
    if (spec.elements_out_per_token.size() != count) {
      per_token.fail("has " + plural(spec.elements_out_per_token.size(), "value") + " for " +
                     layers_text(layers));
    }
  }
  return spec;
}

// Reads the profile of one sentence length; the caller sets batch size and dtype.
Profile times_from(const View& view) {
  Profile profile;
  const View times = view.at("time_s");
  profile.line = times.line();
  profile.time_s = times.numbers();
  const auto known = [&](const char* key, double factor) {
    std::vector<double> values;
    const auto found = view.find(key);
    if (!found) return values;
    values = found->numbers();
    if (values.size() != profile.time_s.size()) {
      found->fail("has " + plural(values.size(), "value") + ", time_s has " +
                  std::to_string(profile.time_s.size()));
    }
    for (double& value : values) value *= factor;
    return values;
  };
  profile.receive_s = known("receive_s", 1);
  profile.send_s = known("send_s", 1);
  profile.activation_bytes = known("activations_MB", kBytesPerMB);
  if (const auto seconds = view.find("feed_s")) profile.feed_s = seconds->number();
  if (const auto seconds = view.find("collect_s")) profile.collect_s = seconds->number();
  return profile;
}

// Threads of a profile; 0 if another tool has written something else there.
double threads_of(const View& view) {
  const auto threads = view.find("threads");
  return threads && threads->is_whole_number() ? threads->whole_number() : 0;
}

// Kernels of a profile; empty where another tool has put something else there.
std::string kernels_of(const View& view) {
  const auto kernels = view.find("kernels");
  if (!kernels) return "";
  for (const char* name : {"onednn", "torch", "emulated"}) {
    if (kernels->is_text(name)) return name;
  }
  return "";
}

Profile profile_from(const View& view) {
  const double batch_size = view.at("batch_size").whole_number(1);
  const std::string dtype(short_dtype(view.at("dtype").text()));
  Profile profile = times_from(view);
  profile.batch_size = batch_size;
  profile.dtype = dtype;
  if (const auto weights = view.find("weights_MB")) {
    profile.weight_bytes = weights->numbers();
    if (profile.weight_bytes.size() != profile.time_s.size()) {
      weights->fail("has " + plural(profile.weight_bytes.size(), "value") + ", time_s has " +
                    std::to_string(profile.time_s.size()));
    }
    for (double& bytes : profile.weight_bytes) bytes *= kBytesPerMB;
  }
  profile.threads = threads_of(view);
  profile.kernels = kernels_of(view);
  if (const auto tokens = view.find("tokens")) profile.tokens = tokens->whole_number(1);
  const auto lengths = view.find("lengths");
  if (!lengths) return profile;
  if (profile.tokens == 0) lengths->fail("needs tokens beside it, the length of time_s");
  std::set<double> seen{profile.tokens};
  for (const View& entry : lengths->items()) {
    const double tokens = entry.at("tokens").whole_number(1);
    if (!seen.insert(tokens).second) {
      entry.fail("is a second entry for " + number_text(tokens) + " tokens; keep one");
    }
    Profile other = times_from(entry);
    other.tokens = tokens;
    if (other.time_s.size() != profile.time_s.size()) {
      entry.at("time_s").fail("has " + plural(other.time_s.size(), "value") + ", that of " +
                              number_text(profile.tokens) + " tokens has " +
                              std::to_string(profile.time_s.size()));
    }
    profile.lengths.push_back(std::move(other));
  }
  return profile;
}

// The lengths at which `profile` was measured, shortest first.
std::vector<double> lengths_of(const Profile& profile) {
  std::vector<double> lengths;
  if (profile.tokens > 0) lengths.push_back(profile.tokens);
  for (const Profile& other : profile.lengths) lengths.push_back(other.tokens);
  std::sort(lengths.begin(), lengths.end());
  return lengths;
}

// Returns a list of `profile` scaled to sentences of `tokens`; unscaled if a length lacks it.
std::vector<double> list_at(const Profile& profile, std::vector<double> Profile::* list, double tokens) {
  std::vector<const Profile*> measured{&profile};
  for (const Profile& other : profile.lengths) {
    if ((other.*list).size() != (profile.*list).size()) return profile.*list;
    measured.push_back(&other);
  }
  std::sort(measured.begin(), measured.end(),
            [](const Profile* a, const Profile* b) { return a->tokens < b->tokens; });
  const std::vector<double> lengths = lengths_of(profile);
  std::vector<double> found;
  for (std::size_t layer = 0; layer < (profile.*list).size(); ++layer) {
    std::vector<double> values;
    for (const Profile* each : measured) values.push_back((each->*list)[layer]);
    // The cost of a link depends only on the bytes.
    const bool of_link = list == &Profile::receive_s || list == &Profile::send_s;
    const Growth growth = of_link ? Growth::kLinear : growth_of(static_cast<int>(layer));
    found.push_back(at_length(lengths, values, tokens, growth));
  }
  return found;
}

// Returns `profile` scaled to sentences of `tokens`.
Profile profile_at(const Profile& profile, double tokens) {
  Profile found = profile;
  for (const auto list : {&Profile::time_s, &Profile::receive_s, &Profile::send_s, &Profile::activation_bytes}) {
    found.*list = list_at(profile, list, tokens);
  }
  found.tokens = tokens;
  found.lengths.clear();
  return found;
}

// Returns the model's sizes for sentences of `tokens`, at least the part that does not grow.
Model model_at(const ModelSpec& spec, double tokens) {
  Model model = spec.model;
  const double more = tokens - spec.tokens;
  model.elements_in = std::max(0.0, model.elements_in + more * spec.elements_in_per_token);
  for (std::size_t i = 0; i < model.elements_out.size(); ++i) {
    model.elements_out[i] = std::max(0.0, model.elements_out[i] + more * spec.elements_out_per_token[i]);
  }
  return model;
}

// Bytes of each layer's weights in the number type of a profile; empty for those of the model.
std::vector<double> weights_in(const NumberType& type, const Profile& profile, const Model& model) {
  if (!profile.weight_bytes.empty()) return profile.weight_bytes;
  if (type.weight_factor == 1) return {};
  return scaled_weights(type, model.mem_bytes);
}

// Explains why a profile cannot be scaled to sentences of `tokens`; empty if it can.
std::string unscaled(const Profile& profile, double tokens) {
  const std::vector<double> lengths = lengths_of(profile);
  if (lengths.size() > 1 || (lengths.size() == 1 && lengths.front() == tokens)) return "";
  const std::string wanted = number_text(tokens);
  if (lengths.empty()) {
    return "does not say with how many tokens it was profiled; its times are not scaled to " + wanted +
           ": profile it again";
  }
  const std::string known = number_text(lengths.front());
  const std::string both = tokens < lengths.front() ? wanted + "," + known : known + "," + wanted;
  return "was profiled with " + known + " tokens only; its times are not scaled to " + wanted +
         ": profile it with --tokens " + both;
}

TypeSpec type_from(const std::string& name, const View& view) {
  TypeSpec spec;
  spec.name = name;
  spec.bw_bytes_per_s = view.at("bw_Mbps").number() * kBytesPerSecondPerMbps;
  spec.mem_bytes = view.at("mem_MB").number() * kBytesPerMB;
  for (const auto& [model, profiles] : view.at("model_profiles").entries()) {
    std::vector<Profile>& known = spec.profiles[model];
    for (const View& entry : profiles.items()) {
      Profile profile = profile_from(entry);
      for (const Profile& other : known) {
        if (other.batch_size == profile.batch_size && other.dtype == profile.dtype) {
          entry.fail("is a second profile for batch size " + number_text(profile.batch_size) + " and dtype " +
                     printable(profile.dtype) + "; keep one");
        }
      }
      known.push_back(std::move(profile));
    }
  }
  return spec;
}

// Whether two names are the same model; directories are compared as paths, however they are written.
bool same_model(const std::string& one, const std::string& other) {
  if (one == other) return true;
  std::error_code error;
  return std::filesystem::is_directory(one, error) && std::filesystem::is_directory(other, error) &&
         std::filesystem::equivalent(one, other, error);
}

// The profiles of a model, under its name or another spelling of its directory.
std::map<std::string, std::vector<Profile>>::const_iterator find_profiles(const TypeSpec& type,
                                                                          const std::string& model) {
  const auto found = type.profiles.find(model);
  if (found != type.profiles.end()) return found;
  return std::find_if(type.profiles.begin(), type.profiles.end(),
                      [&](const auto& entry) { return same_model(entry.first, model); });
}

// "it has batch size 8 with dtype float32, ...": the profiles that a type has instead of the requested one.
std::string offer(const TypeSpec& type, const std::string& model) {
  const auto found = find_profiles(type, model);
  std::vector<std::string> names;
  if (found == type.profiles.end() || found->second.empty()) {
    for (const auto& [other, profiles] : type.profiles) {
      if (!profiles.empty()) names.push_back(printable(other));
    }
    return names.empty() ? "it has no profiles" : "it has profiles of " + listing(names);
  }
  for (const Profile& profile : found->second) {
    names.push_back("batch size " + number_text(profile.batch_size) + " with dtype " +
                    printable(profile.dtype));
  }
  return "it has " + listing(names);
}

std::vector<std::string> printable_all(const std::vector<std::string>& names) {
  std::vector<std::string> shown;
  for (const std::string& name : names) shown.push_back(printable(name));
  return shown;
}

// Indices into problem.hosts, by host.
using HostIndex = std::unordered_map<std::string, int>;

void add_links(const Neighbors& neighbors, const HostIndex& index, const std::vector<LeftOut>& left_out,
               Assembly& assembly) {
  std::set<std::string> known_left_out;
  for (const LeftOut& host : left_out) known_left_out.insert(host.host);
  std::vector<std::string> unknown;
  for (const NeighborSpec& pair : neighbors.entries) {
    bool usable = true;
    for (const std::string& end : {pair.from, pair.to}) {
      if (index.count(end) != 0) continue;
      usable = false;
      const std::string name = printable(end);
      if (known_left_out.count(end) == 0 &&
          std::find(unknown.begin(), unknown.end(), name) == unknown.end()) {
        unknown.push_back(name);
      }
    }
    if (!usable || pair.from == pair.to) continue;
    const int from = index.at(pair.from);
    const int to = index.at(pair.to);
    assembly.problem.links.push_back({from, to, pair.bw_bytes_per_s, pair.latency_s});
  }
  if (!unknown.empty()) {
    assembly.warnings.push_back(printable(neighbors.name, 400) +
                                ": not among the hosts to schedule, ignored: " + listing(unknown));
  }
}

}  // namespace

std::string listing(const std::vector<std::string>& names, std::size_t limit) {
  if (names.empty()) return "none";
  std::string text;
  for (std::size_t i = 0; i < names.size() && i < limit; ++i) text += (i == 0 ? "" : ", ") + names[i];
  if (names.size() > limit) text += " and " + std::to_string(names.size() - limit) + " more";
  return text;
}

std::string nearest(const std::string& wanted, const std::vector<std::string>& names) {
  constexpr std::size_t kLongest = 200;  // anything longer is not a mistyped name
  std::string best;
  std::size_t best_distance = std::max<std::size_t>(2, wanted.size() / 3) + 1;
  if (wanted.size() > kLongest) return best;
  for (const std::string& name : names) {
    if (name.size() > kLongest) continue;
    // Levenshtein distance, computed row by row.
    std::vector<std::size_t> row(name.size() + 1);
    for (std::size_t j = 0; j <= name.size(); ++j) row[j] = j;
    for (std::size_t i = 1; i <= wanted.size(); ++i) {
      std::size_t diagonal = row[0];
      row[0] = i;
      for (std::size_t j = 1; j <= name.size(); ++j) {
        const std::size_t replaced = diagonal + (wanted[i - 1] == name[j - 1] ? 0 : 1);
        diagonal = row[j];
        row[j] = std::min({row[j] + 1, row[j - 1] + 1, replaced});
      }
    }
    if (row.back() < best_distance) {
      best_distance = row.back();
      best = name;
    }
  }
  return best;
}

std::string_view short_dtype(std::string_view dtype) {
  constexpr std::string_view prefix = "torch.";
  return dtype.substr(0, prefix.size()) == prefix ? dtype.substr(prefix.size()) : dtype;
}

Models models_from(const Document& document) {
  Models models{document.name(), {}};
  for (const auto& [name, view] : View(document).entries()) models.entries.push_back(model_from(name, view));
  return models;
}

DeviceTypes device_types_from(const Document& document) {
  DeviceTypes types{document.name(), {}};
  for (const auto& [name, view] : View(document).entries()) types.entries.push_back(type_from(name, view));
  return types;
}

Devices devices_from(const Document& document) {
  Devices devices{document.name(), {}};
  std::unordered_map<std::string, std::string> seen;  // host -> type
  for (const auto& [type, view] : View(document).entries()) {
    TypeHosts entry{type, {}};
    for (const View& item : view.items()) {
      const std::string host = item.text();
      if (host.empty()) item.fail("is an empty host name");
      if (printable(host, host.size() + 1) != host)
        item.fail("is a host name with a control character in it");
      const auto [other, fresh] = seen.emplace(host, type);
      if (!fresh) {
        item.fail(
            "the host " + printable(host) + " is listed twice" +
            (other->second == type ? "" : "; it stands under " + printable(other->second) + " already"));
      }
      entry.hosts.push_back(host);
    }
    devices.entries.push_back(std::move(entry));
  }
  return devices;
}

Neighbors neighbors_from(const Document& document) {
  Neighbors neighbors{document.name(), {}};
  for (const auto& [from, view] : View(document).entries()) {
    for (const auto& [to, link] : view.entries()) {
      NeighborSpec spec{from, to, link.at("bw_Mbps").number() * kBytesPerSecondPerMbps, 0};
      if (const auto latency = link.find("latency_s")) spec.latency_s = latency->number();
      neighbors.entries.push_back(std::move(spec));
    }
  }
  return neighbors;
}

Assembly assemble(const Models& models, const DeviceTypes& types, const Devices& devices,
                  const Neighbors* neighbors, const Request& request) {
  Assembly assembly;
  Problem& problem = assembly.problem;
  const std::string models_name = printable(models.name, 400);
  const std::string types_name = printable(types.name, 400);
  const std::string devices_name = printable(devices.name, 400);

  auto model = std::find_if(models.entries.begin(), models.entries.end(),
                            [&](const ModelSpec& spec) { return spec.name == request.model; });
  if (model == models.entries.end()) {
    model = std::find_if(models.entries.begin(), models.entries.end(),
                         [&](const ModelSpec& spec) { return same_model(spec.name, request.model); });
  }
  if (model == models.entries.end()) {
    std::vector<std::string> names;
    for (const ModelSpec& spec : models.entries) names.push_back(printable(spec.name));
    const std::string near = nearest(request.model, names);
    throw SpecError(models_name + ": no model " + printable(request.model) + "; " +
                    (near.empty() ? "" : "did you mean " + near + "? ") + "the file has: " + listing(names));
  }
  if (model->model.layers() == 0) {
    throw SpecError(models_name + ":" + std::to_string(model->line) + ": " + printable(model->name) +
                    " has no layers to schedule");
  }
  const bool sized = request.tokens > 0 && model->tokens > 0;
  problem.model = sized ? model_at(*model, request.tokens) : model->model;
  if (request.tokens > 0 && !sized) {
    assembly.warnings.push_back(models_name + ": " + printable(model->name) +
                                " does not say for how many tokens its sizes are; they are not scaled to " +
                                number_text(request.tokens) + ": profile the model again");
  }
  problem.batch_size = request.batch_size;
  problem.input_bytes = request.input_bytes;
  problem.buffers_in = request.buffers_in;
  problem.buffers_out = request.buffers_out;

  const std::string dtype(short_dtype(request.dtype));
  const std::string wanted = printable(request.model) + ", batch size " + number_text(request.batch_size) +
                             ", dtype " + printable(dtype);
  std::map<std::string, std::string> dtype_of;  // from the request, with short names
  for (const auto& [type, name] : request.dtype_of) dtype_of.emplace(type, short_dtype(name));
  const auto require_known = [&](const std::string& name) {
    if (find_number_type(short_dtype(name)) != nullptr) return;
    std::set<std::string> there;
    for (const TypeSpec& type : types.entries) {
      const auto found = find_profiles(type, request.model);
      if (found == type.profiles.end()) continue;
      for (const Profile& profile : found->second) there.insert(printable(profile.dtype));
    }
    throw SpecError("unknown dtype " + printable(name) +
                    "; known: float32, float16, bfloat16, int8 (also as torch.float32 ...); " + types_name +
                    " has for this model: " + listing({there.begin(), there.end()}));
  };
  require_known(request.dtype);
  for (const auto& [type, name] : request.dtype_of) {
    require_known(name);
    const auto same = [&type = type](const TypeSpec& spec) { return spec.name == type; };
    if (std::none_of(types.entries.begin(), types.entries.end(), same)) {
      throw SpecError("--dtype-of " + printable(type) + ": no such device type in " + types_name);
    }
  }
  // Links carry the widest type of any stage, whichever stage sends.
  problem.element_bytes = dtype_of.empty() ? find_number_type(dtype)->element_bytes : 0;
  for (const auto& [type, name] : dtype_of) {
    problem.element_bytes = std::max(problem.element_bytes, find_number_type(name)->element_bytes);
  }
  // Stages of any dtype give the outputs of the model as float32.
  problem.output_bytes = problem.model.elements_out.back() * find_number_type("float32")->element_bytes;

  // Types with a profile for the request become types of the problem.
  std::unordered_map<std::string, int> type_index;
  std::unordered_map<std::string, const TypeSpec*> type_spec;
  std::set<std::string> refused;       // types whose profiles all have a dtype that is not allowed
  for (const TypeSpec& type : types.entries) {
    type_spec.emplace(type.name, &type);
    const auto given = dtype_of.find(type.name);
    const std::string& type_dtype = given == dtype_of.end() ? dtype : given->second;
    const auto found = find_profiles(type, request.model);
    if (found == type.profiles.end()) continue;
    for (const Profile& profile : found->second) {
      if (profile.batch_size != request.batch_size || profile.dtype != type_dtype) continue;
      if (!dtype_of.empty() && given == dtype_of.end()) {
        refused.insert(type.name);
        continue;
      }
      if (profile.time_s.size() != problem.model.mem_bytes.size()) {
        throw SpecError(types_name + ":" + std::to_string(profile.line) + ": " + printable(type.name) +
                        ": model_profiles: " + printable(request.model) + ": time_s: has " +
                        plural(profile.time_s.size(), "value") + " for " +
                        plural(problem.model.mem_bytes.size(), "layer") + " (" + models_name + ")");
      }
      type_index.emplace(type.name, static_cast<int>(problem.types.size()));
      const Profile at = request.tokens > 0 && profile.lengths.size() > 0 ? profile_at(profile, request.tokens)
                                                                          : profile;
      if (const std::string why = request.tokens > 0 ? unscaled(profile, request.tokens) : ""; !why.empty()) {
        assembly.warnings.push_back(types_name + ": " + printable(type.name) + " " + why);
      }
      problem.types.push_back({type.name, type.mem_bytes, type.bw_bytes_per_s,
                               weights_in(*find_number_type(type_dtype), profile, problem.model), at.time_s,
                               at.receive_s, at.send_s, at.activation_bytes, at.feed_s, at.collect_s, {}});
      assembly.notes.push_back({type_dtype, profile.threads, profile.kernels, lengths_of(profile)});
    }
  }

  HostIndex host_index;
  std::size_t listed = 0;
  for (TypeHosts entry : devices.entries) {
    if (!request.hosts.empty()) {
      const auto unwanted = [&](const std::string& host) {
        return std::find(request.hosts.begin(), request.hosts.end(), host) == request.hosts.end();
      };
      entry.hosts.erase(std::remove_if(entry.hosts.begin(), entry.hosts.end(), unwanted), entry.hosts.end());
    }
    if (entry.hosts.empty()) continue;
    listed += entry.hosts.size();
    const auto type = type_index.find(entry.type);
    if (type != type_index.end()) {
      for (const std::string& host : entry.hosts) {
        host_index.emplace(host, static_cast<int>(problem.hosts.size()));
        problem.hosts.push_back({host, type->second});
      }
      continue;
    }
    const auto spec = type_spec.find(entry.type);
    std::string why;
    if (spec == type_spec.end()) {
      std::vector<std::string> names;
      for (const TypeSpec& known : types.entries) names.push_back(printable(known.name));
      why = "its type " + printable(entry.type) + " is not in " + types_name;
      assembly.warnings.push_back(devices_name + ": the type " + printable(entry.type) + " is not in " +
                                  types_name + ", which has: " + listing(names) +
                                  "; left out: " + plural(entry.hosts.size(), "host"));
    } else if (refused.count(entry.type) != 0) {
      why = "no number type is allowed for its type " + printable(entry.type);
      assembly.warnings.push_back(types_name + ": no number type is allowed for " + printable(entry.type) +
                                  "; left out: " + plural(entry.hosts.size(), "host"));
    } else {
      why = "its type " + printable(entry.type) + " has no profile for " + wanted;
      assembly.warnings.push_back(types_name + ": " + printable(entry.type) + " has no profile for " +
                                  wanted + "; " + offer(*spec->second, request.model) +
                                  "; left out: " + plural(entry.hosts.size(), "host"));
    }
    for (const std::string& host : entry.hosts) assembly.left_out.push_back({host, entry.type, why});
  }
  if (listed == 0) {
    throw SpecError(devices_name + (request.hosts.empty() ? ": lists no host" : ": lists none of the hosts " + listing(printable_all(request.hosts))));
  }
  if (problem.hosts.empty()) {
    throw SpecError("no host is left to schedule on; " + assembly.warnings.front());
  }

  // Otherwise unknown hosts would silently get no stage.
  std::vector<std::string> absent;
  for (const std::string& host : request.hosts) {
    const bool there = std::any_of(devices.entries.begin(), devices.entries.end(), [&](const TypeHosts& entry) {
      return std::find(entry.hosts.begin(), entry.hosts.end(), host) != entry.hosts.end();
    });
    if (!there) absent.push_back(printable(host));
  }
  if (!absent.empty()) {
    assembly.warnings.push_back(devices_name + ": does not list " + listing(absent) + "; no stage is scheduled there");
  }

  if (!request.data_host.empty()) {
    auto found = host_index.find(request.data_host);
    if (found == host_index.end()) {
      for (const LeftOut& host : assembly.left_out) {
        if (host.host != request.data_host) continue;
        const auto spec = type_spec.find(host.type);
        if (spec == type_spec.end()) throw SpecError("--data-host " + printable(request.data_host) + ": " + host.why);
        // It has no stage, but feeding and collecting use its links.
        const std::size_t layers = problem.model.mem_bytes.size();
        DeviceType type;
        type.name = host.type + " (data host)";
        type.bw_bytes_per_s = spec->second->bw_bytes_per_s;
        type.time_s.assign(layers, 0);
        type.stage_s.assign((layers + 1) * (layers + 1), kInfinity);
        found = host_index.emplace(host.host, static_cast<int>(problem.hosts.size())).first;
        problem.hosts.push_back({host.host, static_cast<int>(problem.types.size())});
        problem.types.push_back(std::move(type));
        assembly.notes.emplace_back();
        break;
      }
    }
    if (found == host_index.end()) {
      std::vector<std::string> names;
      for (const Host& host : problem.hosts) names.push_back(printable(host.name));
      throw SpecError("--data-host " + printable(request.data_host) + ": no such host in " + devices_name +
                      ", which has: " + listing(names));
    }
    problem.data_host = found->second;
  }
  if (neighbors != nullptr) add_links(*neighbors, host_index, assembly.left_out, assembly);
  return assembly;
}

}  // namespace pipeedge::yaml
