#include "assembly.hpp"

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <system_error>
#include <unordered_map>
#include <utility>

#include "../core/links.hpp"
#include "../core/number_types.hpp"
#include "scaling.hpp"
#include "wording.hpp"

namespace pipeedge::yaml {
namespace {

// Adds to a type of the problem what a transport costs it for uncompressed microbatches.
void add_handling(const Handling& handling, const Problem& problem, DeviceType& type) {
  const auto layers = static_cast<std::size_t>(problem.model.layers());
  type.receive_s.resize(layers);
  type.send_s.resize(layers);
  const auto receive_s = [&](std::size_t cut) {
    return handling.receive_s + handling.receive_s_per_byte * cut_bytes(problem, static_cast<int>(cut));
  };
  const auto send_s = [&](std::size_t cut) {
    return handling.send_s + handling.send_s_per_byte * cut_bytes(problem, static_cast<int>(cut));
  };
  for (std::size_t layer = 0; layer < layers; ++layer) {
    type.receive_s[layer] += receive_s(layer);
    type.send_s[layer] += send_s(layer + 1);
  }
  if (type.feed_s > 0) type.input_send_s = send_s(0);
  if (type.collect_s > 0) type.output_receive_s = receive_s(layers);
}

// Sets the power of a type of the problem. While busy, it is that of its profile, else of the device type, else the
// largest of any of its profiles; at least that of the idle device, which a measurement may fall below by its noise.
void set_watts(const TypeSpec& spec, std::optional<double> profiled, DeviceType& type) {
  std::optional<double> busy_w = profiled ? profiled : spec.busy_w;
  if (!busy_w) {
    for (const ModelProfiles& model : spec.models) {
      for (const Profile& profile : model.profiles) busy_w = std::max(busy_w, profile.busy_w);
    }
  }
  type.idle_w = spec.idle_w.value_or(0);
  if (busy_w) type.busy_w = std::max(*busy_w, type.idle_w);
}

// Bytes of each layer's weights in the number type of a profile; empty for those of the model.
std::vector<double> weights_in(const NumberType& type, const Profile& profile, const Model& model) {
  if (!profile.weight_bytes.empty()) return profile.weight_bytes;
  if (type.weight_factor == 1) return {};
  return scaled_weights(type, model.mem_bytes);
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

// Puts a problem together, a step for each file; a step uses what those before it have found.
class Assembler {
 public:
  Assembler(const Models& models, const DeviceTypes& types, const Devices& devices, const Request& request)
      : models_(models), types_(types), devices_(devices), request_(request),
        models_name_(printable(models.name(), 400)), types_name_(printable(types.name(), 400)),
        devices_name_(printable(devices.name(), 400)), dtype_(short_dtype(request.dtype)) {
    for (const auto& [type, name] : request.dtype_of) dtype_of_.emplace(type, short_dtype(name));
    for (const TypeSpec& type : types.entries) type_spec_.emplace(type.name, &type);
  }

  Assembly assemble(const Neighbors* neighbors) {
    set_model();
    check_number_types();
    set_bytes();
    for (const TypeSpec& type : types_.entries) add_type(type);
    add_hosts();
    warn_of_absent_hosts();
    if (!request_.data_host.empty()) set_data_host();
    if (neighbors != nullptr) add_links(*neighbors);
    return std::move(assembly_);
  }

 private:
  void warn(std::string line) { assembly_.warnings.push_back(std::move(line)); }

  void set_model() {
    const ModelSpec* const model = find_model(models_, request_.model);
    if (model == nullptr) throw no_model();
    if (model->model.layers() == 0) {
      throw SpecError(models_name_ + ":" + std::to_string(model->line) + ": " + printable(model->name) +
                      " has no layers to schedule");
    }
    const bool sized = request_.tokens > 0 && model->tokens > 0;
    problem_.model = sized ? model_at(*model, request_.tokens) : model->model;
    if (request_.tokens > 0 && !sized) {
      warn(models_name_ + ": " + printable(model->name) +
           " does not say for how many tokens its sizes are; they are not scaled to " +
           number_text(request_.tokens) + ": profile the model again");
    }
    problem_.batch_size = request_.batch_size;
    problem_.input_bytes = request_.input_bytes;
    problem_.buffers_in = request_.buffers_in;
    problem_.buffers_out = request_.buffers_out;
  }

  SpecError no_model() const {
    std::vector<std::string> names;
    for (const ModelSpec& spec : models_.entries) names.push_back(printable(spec.name));
    const std::string near = nearest(request_.model, names);
    return SpecError(models_name_ + ": no model " + printable(request_.model) + "; " +
                     (near.empty() ? "" : "did you mean " + near + "? ") + "the file has: " + listing(names));
  }

  void check_number_types() const {
    check_number_type(request_.dtype);
    for (const auto& [type, name] : request_.dtype_of) {
      check_number_type(name);
      if (type_spec_.count(type) == 0) {
        throw SpecError("--dtype-of " + printable(type) + ": no such device type in " + types_name_);
      }
    }
  }

  void check_number_type(const std::string& name) const {
    if (find_number_type(short_dtype(name)) != nullptr) return;
    std::set<std::string> there;
    for (const TypeSpec& type : types_.entries) {
      const std::vector<Profile>* const found = find_profiles(type, request_.model);
      if (found == nullptr) continue;
      for (const Profile& profile : *found) there.insert(printable(short_dtype(profile.dtype)));
    }
    throw SpecError("unknown dtype " + printable(name) +
                    "; known: float32, float16, bfloat16, int8 (also as torch.float32 ...); " + types_name_ +
                    " has for this model: " + listing({there.begin(), there.end()}));
  }

  void set_bytes() {
    // Links carry the widest type of any stage, whichever stage sends.
    problem_.element_bytes = dtype_of_.empty() ? find_number_type(dtype_)->element_bytes : 0;
    for (const auto& [type, name] : dtype_of_) {
      problem_.element_bytes = std::max(problem_.element_bytes, find_number_type(name)->element_bytes);
    }
    // Stages of any dtype give the outputs of the model as float32.
    problem_.output_bytes = problem_.model.elements_out.back() * find_number_type("float32")->element_bytes;
  }

  // Adds a type to the problem if it has a profile for the request.
  void add_type(const TypeSpec& type) {
    const auto given = dtype_of_.find(type.name);
    const std::string& dtype = given == dtype_of_.end() ? dtype_ : given->second;
    const std::vector<Profile>* const found = find_profiles(type, request_.model);
    if (found == nullptr) return;
    for (const Profile& profile : *found) {
      if (profile.batch_size != request_.batch_size || short_dtype(profile.dtype) != dtype) continue;
      if (!dtype_of_.empty() && given == dtype_of_.end()) {
        refused_.insert(type.name);
        continue;
      }
      add_profile(type, dtype, profile);
    }
  }

  void add_profile(const TypeSpec& type, const std::string& dtype, const Profile& profile) {
    const std::size_t layers = problem_.model.mem_bytes.size();
    if (profile.time_s.size() != layers) {
      throw SpecError(types_name_ + ":" + std::to_string(profile.line) + ": " + printable(type.name) +
                      ": model_profiles: " + printable(request_.model) + ": time_s: has " +
                      plural(profile.time_s.size(), "value") + " for " + plural(layers, "layer") + " (" +
                      models_name_ + ")");
    }
    if (const std::string why = request_.tokens > 0 ? why_unscaled(profile, request_.tokens) : ""; !why.empty()) {
      warn(types_name_ + ": " + printable(type.name) + " " + why);
    }
    const bool scales = request_.tokens > 0 && !profile.lengths.empty();
    const Profile at = scales ? profile_at(profile, request_.tokens) : profile;
    type_index_.emplace(type.name, static_cast<int>(problem_.types.size()));
    problem_.types.push_back({type.name, type.mem_bytes, type.bw_bytes_per_s,
                              weights_in(*find_number_type(dtype), profile, problem_.model), at.time_s,
                              at.receive_s, at.send_s, at.activation_bytes, at.feed_s.value_or(0),
                              at.collect_s.value_or(0), 0, 0, {}});
    set_watts(type, profile.busy_w, problem_.types.back());
    const auto handling = profile.handling.find(request_.transport);
    if (handling != profile.handling.end()) add_handling(handling->second, problem_, problem_.types.back());
    assembly_.notes.push_back({dtype, profile.threads, profile.kernels, lengths_of(profile), {}});
  }

  void add_hosts() {
    std::size_t listed = 0;
    for (const TypeHosts& entry : devices_.entries) {
      const std::vector<std::string> hosts = requested(entry.hosts);
      if (hosts.empty()) continue;
      listed += hosts.size();
      const auto type = type_index_.find(entry.type);
      if (type == type_index_.end()) {
        leave_out(entry.type, hosts);
        continue;
      }
      for (const std::string& host : hosts) {
        host_index_.emplace(host, static_cast<int>(problem_.hosts.size()));
        problem_.hosts.push_back({host, type->second});
      }
    }
    if (listed == 0) {
      throw SpecError(devices_name_ + (request_.hosts.empty()
                                           ? ": lists no host"
                                           : ": lists none of the hosts " + listing(printable_all(request_.hosts))));
    }
    if (problem_.hosts.empty()) {
      throw SpecError("no host is left to schedule on; " + assembly_.warnings.front());
    }
  }

  // Those of `hosts` that the request allows.
  std::vector<std::string> requested(const std::vector<std::string>& hosts) const {
    const std::vector<std::string>& allowed = request_.hosts;
    if (allowed.empty()) return hosts;
    std::vector<std::string> found;
    std::copy_if(hosts.begin(), hosts.end(), std::back_inserter(found), [&](const std::string& host) {
      return std::find(allowed.begin(), allowed.end(), host) != allowed.end();
    });
    return found;
  }

  // Leaves out the hosts of a type that the problem does not have.
  void leave_out(const std::string& type, const std::vector<std::string>& hosts) {
    const std::string name = printable(type);
    const std::string number = "; left out: " + plural(hosts.size(), "host");
    const auto spec = type_spec_.find(type);
    std::string why;
    if (spec == type_spec_.end()) {
      std::vector<std::string> names;
      for (const TypeSpec& known : types_.entries) names.push_back(printable(known.name));
      why = "its type " + name + " is not in " + types_name_;
      warn(devices_name_ + ": the type " + name + " is not in " + types_name_ + ", which has: " + listing(names) +
           number);
    } else if (refused_.count(type) != 0) {
      why = "no number type is allowed for its type " + name;
      warn(types_name_ + ": no number type is allowed for " + name + number);
    } else {
      const std::string lack = " has no profile for " + printable(request_.model) + ", batch size " +
                               number_text(request_.batch_size) + ", dtype " + printable(dtype_);
      why = "its type " + name + lack;
      if (request_.names_unprofiled) {
        warn(types_name_ + ": " + name + lack + "; " + offer(*spec->second, request_.model) + number);
      }
    }
    for (const std::string& host : hosts) assembly_.left_out.push_back({host, type, why});
  }

  // Otherwise unknown hosts would silently get no stage.
  void warn_of_absent_hosts() {
    std::vector<std::string> absent;
    for (const std::string& host : request_.hosts) {
      const bool there = std::any_of(devices_.entries.begin(), devices_.entries.end(), [&](const TypeHosts& entry) {
        return std::find(entry.hosts.begin(), entry.hosts.end(), host) != entry.hosts.end();
      });
      if (!there) absent.push_back(printable(host));
    }
    if (!absent.empty()) {
      warn(devices_name_ + ": does not list " + listing(absent) + "; no stage is scheduled there");
    }
  }

  void set_data_host() {
    const std::string option = "--data-host " + printable(request_.data_host);
    for (const LeftOut& host : assembly_.left_out) {
      if (host.host != request_.data_host || host_index_.count(host.host) != 0) continue;
      const auto spec = type_spec_.find(host.type);
      if (spec == type_spec_.end()) throw SpecError(option + ": " + host.why);
      add_data_host(host, *spec->second);
    }
    const auto found = host_index_.find(request_.data_host);
    if (found == host_index_.end()) {
      std::vector<std::string> names;
      for (const Host& host : problem_.hosts) names.push_back(printable(host.name));
      throw SpecError(option + ": no such host in " + devices_name_ + ", which has: " + listing(names));
    }
    problem_.data_host = found->second;
  }

  // Adds a host that has no stage, as feeding and collecting use its links.
  void add_data_host(const LeftOut& host, const TypeSpec& spec) {
    const std::size_t layers = problem_.model.mem_bytes.size();
    DeviceType type;
    type.name = host.type + " (data host)";
    type.bw_bytes_per_s = spec.bw_bytes_per_s;
    set_watts(spec, std::nullopt, type);
    type.time_s.assign(layers, 0);
    type.stage_s.assign((layers + 1) * (layers + 1), kInfinity);
    host_index_.emplace(host.host, static_cast<int>(problem_.hosts.size()));
    problem_.hosts.push_back({host.host, static_cast<int>(problem_.types.size())});
    problem_.types.push_back(std::move(type));
    assembly_.notes.emplace_back();
  }

  void add_links(const Neighbors& neighbors) {
    std::set<std::string> left_out;
    for (const LeftOut& host : assembly_.left_out) left_out.insert(host.host);
    std::vector<std::string> unknown;
    const auto usable = [&](const std::string& host) {
      if (host_index_.count(host) != 0) return true;
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
        problem_.links.push_back(
            {host_index_.at(entry.from), host_index_.at(link.to), link.bw_bytes_per_s, link.latency_s});
      }
    }
    if (!unknown.empty()) {
      warn(printable(neighbors.name(), 400) + ": not among the hosts to schedule, ignored: " + listing(unknown));
    }
  }

  const Models& models_;
  const DeviceTypes& types_;
  const Devices& devices_;
  const Request& request_;
  const std::string models_name_, types_name_, devices_name_;  // for messages
  const std::string dtype_;                                    // of the request, with a short name
  std::map<std::string, std::string> dtype_of_;                // the same by device type
  std::unordered_map<std::string, const TypeSpec*> type_spec_;
  Assembly assembly_;
  Problem& problem_ = assembly_.problem;
  std::unordered_map<std::string, int> type_index_;  // into problem_.types
  std::set<std::string> refused_;                    // types whose profiles all have a dtype that is not allowed
  std::unordered_map<std::string, int> host_index_;  // into problem_.hosts
};

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
  return Assembler(models, types, devices, request).assemble(neighbors);
}

}  // namespace pipeedge::yaml
