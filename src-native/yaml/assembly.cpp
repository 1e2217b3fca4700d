#include "assembly.hpp"

#include <algorithm>
#include <filesystem>
#include <set>
#include <system_error>
#include <unordered_map>
#include <utility>

#include "../core/lengths.hpp"
#include "../core/links.hpp"
#include "../core/number_types.hpp"
#include "wording.hpp"

namespace pipeedge::yaml {
namespace {

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

// Adds to a type of the problem what a transport costs it for uncompressed microbatches. The data rank is charged
// for receiving the results only: the first stage is mostly on its host, and then takes its input from memory.
void add_handling(const Handling& handling, const Problem& problem, DeviceType& type) {
  const auto layers = static_cast<std::size_t>(problem.model.layers());
  type.receive_s.resize(layers);
  type.send_s.resize(layers);
  const auto receive_s = [&](std::size_t cut) {
    return handling.receive_s + handling.receive_s_per_byte * cut_bytes(problem, static_cast<int>(cut));
  };
  for (std::size_t layer = 0; layer < layers; ++layer) {
    type.receive_s[layer] += receive_s(layer);
    type.send_s[layer] +=
        handling.send_s + handling.send_s_per_byte * cut_bytes(problem, static_cast<int>(layer) + 1);
  }
  if (type.collect_s > 0) type.collect_s += receive_s(layers);
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

// Whether two names are the same model; directories are compared as paths, however they are written.
bool same_model(const std::string& one, const std::string& other) {
  if (one == other) return true;
  std::error_code error;
  return std::filesystem::is_directory(one, error) && std::filesystem::is_directory(other, error) &&
         std::filesystem::equivalent(one, other, error);
}

// "it has batch size 8 with dtype float32, ...": the profiles that a type has instead of the requested one.
std::string offer(const TypeSpec& type, const std::string& model) {
  const std::vector<Profile>* const found = find_profiles(type, model);
  std::vector<std::string> names;
  if (found == nullptr || found->empty()) {
    for (const ModelProfiles& other : type.models) {
      if (!other.profiles.empty()) names.push_back(printable(other.model));
    }
    return names.empty() ? "it has no profiles" : "it has profiles of " + listing(names);
  }
  for (const Profile& profile : *found) {
    names.push_back("batch size " + number_text(profile.batch_size) + " with dtype " +
                    printable(short_dtype(profile.dtype)));
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

void add_links(const Neighbors& neighbors, const HostIndex& index, Assembly& assembly) {
  std::set<std::string> left_out;
  for (const LeftOut& host : assembly.left_out) left_out.insert(host.host);
  std::vector<std::string> unknown;
  const auto usable = [&](const std::string& host) {
    if (index.count(host) != 0) return true;
    const std::string name = printable(host);
    if (left_out.count(host) == 0 && std::find(unknown.begin(), unknown.end(), name) == unknown.end()) {
      unknown.push_back(name);
    }
    return false;
  };
  for (const HostNeighbors& entry : neighbors.entries) {
    for (const NeighborSpec& link : entry.links) {
      const bool from = usable(entry.from);
      const bool to = usable(link.to);
      if (!from || !to || entry.from == link.to) continue;
      assembly.problem.links.push_back(
          {index.at(entry.from), index.at(link.to), link.bw_bytes_per_s, link.latency_s});
    }
  }
  if (!unknown.empty()) {
    assembly.warnings.push_back(printable(neighbors.name(), 400) +
                                ": not among the hosts to schedule, ignored: " + listing(unknown));
  }
}

}  // namespace

const std::vector<Profile>* find_profiles(const TypeSpec& type, const std::string& model) {
  const auto& models = type.models;
  auto found = std::find_if(models.begin(), models.end(), [&](const auto& entry) { return entry.model == model; });
  if (found == models.end()) {
    found = std::find_if(models.begin(), models.end(),
                         [&](const auto& entry) { return same_model(entry.model, model); });
  }
  return found == models.end() ? nullptr : &found->profiles;
}

const ModelSpec* find_model(const Models& models, const std::string& name) {
  const auto& entries = models.entries;
  auto found = std::find_if(entries.begin(), entries.end(), [&](const ModelSpec& spec) { return spec.name == name; });
  if (found == entries.end()) {
    found = std::find_if(entries.begin(), entries.end(),
                         [&](const ModelSpec& spec) { return same_model(spec.name, name); });
  }
  return found == entries.end() ? nullptr : &*found;
}

Assembly assemble(const Models& models, const DeviceTypes& types, const Devices& devices,
                  const Neighbors* neighbors, const Request& request) {
  Assembly assembly;
  Problem& problem = assembly.problem;
  const std::string models_name = printable(models.name(), 400);
  const std::string types_name = printable(types.name(), 400);
  const std::string devices_name = printable(devices.name(), 400);

  const ModelSpec* const model = find_model(models, request.model);
  if (model == nullptr) {
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
      const std::vector<Profile>* const found = find_profiles(type, request.model);
      if (found == nullptr) continue;
      for (const Profile& profile : *found) there.insert(printable(short_dtype(profile.dtype)));
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
    const std::vector<Profile>* const found = find_profiles(type, request.model);
    if (found == nullptr) continue;
    for (const Profile& profile : *found) {
      if (profile.batch_size != request.batch_size || short_dtype(profile.dtype) != type_dtype) continue;
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
                               at.receive_s, at.send_s, at.activation_bytes, at.feed_s.value_or(0), at.collect_s.value_or(0), {}});
      const auto handling = profile.handling.find(request.transport);
      if (handling != profile.handling.end()) add_handling(handling->second, problem, problem.types.back());
      assembly.notes.push_back({type_dtype, profile.threads, profile.kernels, lengths_of(profile), {}});
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
      if (request.names_unprofiled) {
        assembly.warnings.push_back(types_name + ": " + printable(entry.type) + " has no profile for " +
                                    wanted + "; " + offer(*spec->second, request.model) +
                                    "; left out: " + plural(entry.hosts.size(), "host"));
      }
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
  if (neighbors != nullptr) add_links(*neighbors, host_index, assembly);
  return assembly;
}

}  // namespace pipeedge::yaml
