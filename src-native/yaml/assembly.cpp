#include "assembly.hpp"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <system_error>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "../core/links.hpp"
#include "../core/number_types.hpp"
#include "wording.hpp"

namespace pipeedge::yaml {
namespace {

// A microbatch size and a number type, as profiles have them.
using Conditions = std::pair<double, std::string>;

std::string words(const Conditions& conditions) {
  return "microbatches of " + number_text(conditions.first) + " in " + printable(conditions.second);
}

// Agreement of a profile with float32, if known.
std::optional<double> agreement_of(const Profile& profile) {
  return short_dtype(profile.dtype) == "float32" ? 1 : profile.agreement;
}

constexpr const char* kKnownTypes = "known: float32, float16, bfloat16, int8, int4 (also as torch.float32 ...)";

// Losses of number types and bits that were not measured only rank plans that are otherwise equal.
constexpr double kNominalLoss = 0.01;
double nominal_loss(int bits) { return 0.5 / (std::pow(2.0, bits) - 1); }

// Adds to a type of a setting what a transport costs it for uncompressed microbatches.
void add_handling(const Handling& handling, const Problem& problem, const Setting& setting, DeviceType& type) {
  const auto layers = static_cast<std::size_t>(problem.layers());
  type.receive_s.resize(layers);
  type.send_s.resize(layers);
  const auto receive_s = [&](std::size_t cut) {
    return handling.receive_s + handling.receive_s_per_byte * mean_bytes(problem, setting, static_cast<int>(cut));
  };
  const auto send_s = [&](std::size_t cut) {
    return handling.send_s + handling.send_s_per_byte * mean_bytes(problem, setting, static_cast<int>(cut));
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

// The profiles of a model on a device type; null if there are none.
const std::vector<Profile>* find_profiles(const TypeSpec& type, const std::string& model) {
  const auto& models = type.models;
  auto found = std::find_if(models.begin(), models.end(), [&](const auto& entry) { return entry.model == model; });
  if (found == models.end()) {
    found =
        std::find_if(models.begin(), models.end(), [&](const auto& entry) { return same_model(entry.model, model); });
  }
  return found == models.end() ? nullptr : &found->profiles;
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

// The model of this name, or with another spelling of its directory; null if there is none.
const ModelSpec* find_model(const Models& models, const std::string& name) {
  const auto& entries = models.entries;
  auto found = std::find_if(entries.begin(), entries.end(), [&](const ModelSpec& spec) { return spec.name == name; });
  if (found == entries.end()) {
    found = std::find_if(entries.begin(), entries.end(),
                         [&](const ModelSpec& spec) { return same_model(spec.name, name); });
  }
  return found == entries.end() ? nullptr : &*found;
}

// Puts a problem together, a step for each file; a step uses what those before it have found.
class Assembler {
 public:
  Assembler(const Models& models, const DeviceTypes& types, const Devices& devices, const Request& request)
      : models_(models), types_(types), devices_(devices), request_(request),
        models_name_(printable(models.name(), 400)), types_name_(printable(types.name(), 400)),
        devices_name_(printable(devices.name(), 400)) {
    for (const auto& [type, name] : request.dtype_of) dtype_of_.emplace(type, short_dtype(name));
    for (const TypeSpec& type : types.entries) type_spec_.emplace(type.name, &type);
  }

  Assembly assemble(const Neighbors* neighbors) {
    set_model();
    data_host_ = request_.data_host;
    if (model_->context > 0) {
      add_steps();
    } else {
      if (request_.texts.given()) {
        throw SpecError(models_name_ + ": " + printable(model_->name) +
                        " has no context, so it does not generate text: leave out --streams, --context and the like");
      }
      check_limits();
      for (const Conditions& one : conditions()) add_setting(one);
    }
    add_hosts();
    warn_of_absent_hosts();
    if (!data_host_.empty()) set_data_host();
    if (model_->context > 0) add_asides();
    if (neighbors != nullptr) add_links(*neighbors);
    if (request_.choice) {
      add_widths();
      name_unprofiled();
    }
    return std::move(assembly_);
  }

 private:
  void warn(std::string text) {
    auto& warnings = assembly_.warnings;
    if (std::find(warnings.begin(), warnings.end(), text) == warnings.end()) warnings.push_back(std::move(text));
  }

  void set_model() {
    model_ = find_model(models_, request_.model);
    if (model_ == nullptr) throw no_model();
    if (model_->model.layers() == 0) {
      throw SpecError(models_name_ + ":" + std::to_string(model_->line) + ": " + printable(model_->name) +
                      " has no layers to schedule");
    }
    const bool sized = request_.tokens > 0 && model_->tokens > 0;
    problem_.model = sized ? model_at(*model_, request_.tokens) : model_->model;
    if (request_.tokens > 0 && !sized) {
      warn(models_name_ + ": " + printable(model_->name) +
           " does not say for how many tokens its sizes are; they are not scaled to " + number_text(request_.tokens) +
           ": profile the model again");
    }
    if (!request_.choice) return;
    problem_.max_loss = anything() ? kInfinity : 1 - request_.choice->min_agreement;
    if (model_->context == 0) problem_.max_latency_s = request_.choice->max_latency_s;
  }

  SpecError no_model() const {
    std::vector<std::string> names;
    for (const ModelSpec& spec : models_.entries) names.push_back(printable(spec.name));
    const std::string near = nearest(request_.model, names);
    return SpecError(models_name_ + ": no model " + printable(request_.model) + "; " +
                     (near.empty() ? "" : "did you mean " + near + "? ") + "the file has: " + listing(names));
  }

  // Whether a plan may use what was not measured.
  bool anything() const { return request_.choice->min_agreement <= 0; }

  // The microbatch sizes and number types of the problem.
  std::vector<Conditions> conditions() {
    check_number_type(request_.dtype);
    for (const auto& [type, name] : request_.dtype_of) {
      check_number_type(name);
      if (type_spec_.count(type) == 0) {
        throw SpecError("--dtype-of " + printable(type) + ": no such device type in " + types_name_);
      }
    }
    if (!request_.choice) return {{request_.batch_size, std::string(short_dtype(request_.dtype))}};
    std::set<Conditions> offered;
    for (const TypeSpec* type : used_types()) {
      const std::vector<Profile>* const profiles = find_profiles(*type, request_.model);
      for (std::size_t p = 0; profiles != nullptr && p < profiles->size(); ++p) {
        const Profile& profile = (*profiles)[p];
        if (!asked_for(profile)) continue;
        if (find_number_type(short_dtype(profile.dtype)) == nullptr) {
          throw SpecError(types_name_ + ": " + printable(type->name) + " has a profile of " +
                          printable(request_.model) + " in dtype " + printable(profile.dtype) + "; " + kKnownTypes);
        }
        offered.emplace(profile.batch_size, std::string(short_dtype(profile.dtype)));
      }
    }
    if (!offered.empty()) return {offered.begin(), offered.end()};
    // The message about a single microbatch size and number type names what there is.
    Request single = request_;
    single.choice.reset();
    if (!request_.choice->batch_sizes.empty()) single.batch_size = request_.choice->batch_sizes.front();
    if (!request_.choice->dtypes.empty()) single.dtype = request_.choice->dtypes.front();
    Assembler(models_, types_, devices_, single).assemble(nullptr);
    throw SpecError(types_name_ + ": no profile of " + printable(request_.model) +
                    " has a requested microbatch size and number type");
  }

  void check_number_type(const std::string& name) const {
    if (find_number_type(short_dtype(name)) != nullptr) return;
    std::set<std::string> there;
    for (const TypeSpec& type : types_.entries) {
      const std::vector<Profile>* const found = find_profiles(type, request_.model);
      if (found == nullptr) continue;
      for (const Profile& profile : *found) there.insert(printable(short_dtype(profile.dtype)));
    }
    throw SpecError("unknown dtype " + printable(name) + "; " + kKnownTypes + "; " + types_name_ +
                    " has for this model: " + listing({there.begin(), there.end()}));
  }

  bool asked_for(const Profile& profile) const {
    const auto& sizes = request_.choice->batch_sizes;
    const auto& dtypes = request_.choice->dtypes;
    const auto same = [&](const std::string& dtype) { return short_dtype(dtype) == short_dtype(profile.dtype); };
    return (sizes.empty() || std::find(sizes.begin(), sizes.end(), profile.batch_size) != sizes.end()) &&
           (dtypes.empty() || std::any_of(dtypes.begin(), dtypes.end(), same));
  }

  // Device types with hosts to plan on.
  std::vector<const TypeSpec*> used_types() const {
    std::vector<const TypeSpec*> used;
    for (const TypeSpec& type : types_.entries) {
      for (const TypeHosts& entry : devices_.entries) {
        if (entry.type == type.name && !requested(entry.hosts).empty()) used.push_back(&type);
      }
    }
    return used;
  }

  void add_setting(const Conditions& conditions) {
    Setting setting;
    setting.batch_size = conditions.first;
    setting.dtype = conditions.second;
    setting.input_bytes = request_.input_bytes;
    setting.buffers_in = request_.buffers_in;
    setting.buffers_out = request_.buffers_out;
    // Links carry the widest type of any stage, whichever stage sends.
    setting.element_bytes = dtype_of_.empty() ? find_number_type(setting.dtype)->element_bytes : 0;
    for (const auto& [type, name] : dtype_of_) {
      setting.element_bytes = std::max(setting.element_bytes, find_number_type(name)->element_bytes);
    }
    // Stages of any dtype give the outputs of the model as float32.
    setting.output_bytes = problem_.model.elements_out.back() * find_number_type("float32")->element_bytes;
    lengths_ = request_.lengths.empty() ? std::vector<Length>{{request_.tokens, 1}}
                                        : microbatch_lengths(request_.lengths, setting.batch_size);
    if (!request_.lengths.empty() && model_->tokens > 0) add_carried(setting);
    type_index_.emplace_back();
    for (const TypeSpec& type : types_.entries) add_type(type, setting);
    problem_.settings.push_back(std::move(setting));
  }

  void check_limits() const {
    if (request_.texts.max_token_s < kInfinity && !request_.choice) {
      throw SpecError("--max-latency needs --plan auto, which chooses what it limits");
    }
    if (request_.texts.min_tokens_per_s > 0 && request_.texts.alone) {
      throw SpecError("--min-throughput needs --objective energy, which would otherwise choose a slower plan");
    }
  }

  // Settings of a decoder: one for each number type and number of groups in which the streams may step. With as many
  // groups, some rows a group.
  void add_steps() {
    texts_ = request_.texts.complete(model_->context);
    if (texts_.context > model_->context || texts_.prompt + texts_.answer > texts_.context) {
      throw SpecError(printable(model_->name) + " has a context of " + number_text(model_->context) +
                      " tokens: " + number_text(texts_.prompt) + " of a prompt and " + number_text(texts_.answer) +
                      " of an answer have to fit into --context " + number_text(texts_.context));
    }
    if (request_.data_host.empty()) {
      for (const TypeHosts& entry : devices_.entries) {
        const std::vector<std::string> hosts = requested(entry.hosts);
        if (data_host_.empty() && !hosts.empty() && type_spec_.count(entry.type) != 0) data_host_ = hosts.front();
      }
    }
    double hosts = 0;
    for (const TypeHosts& entry : devices_.entries) hosts += static_cast<double>(requested(entry.hosts).size());
    variation_ = largest_variation();
    problem_.most_items = texts_.alone ? 1 : texts_.streams;
    for (const std::string& dtype : number_types_of_steps()) {
      if (texts_.alone) {
        add_step_setting(dtype, 1);
        continue;
      }
      for (const double groups : texts_.group_counts(hosts)) add_step_setting(dtype, texts_.streams / groups);
    }
    std::stable_sort(problem_.settings.begin(), problem_.settings.end(), [](const Setting& a, const Setting& b) {
      return std::tie(a.batch_size, a.dtype) < std::tie(b.batch_size, b.dtype);
    });
    type_index_.clear();
    for (const Setting& setting : problem_.settings) {
      auto& index = type_index_.emplace_back();
      for (std::size_t t = 0; t < setting.types.size(); ++t) index.emplace(setting.types[t].name, static_cast<int>(t));
    }
    assembly_.texts = texts_;
  }

  // Of the steps of all hosts that may take part.
  double largest_variation() const {
    double most = 0;
    for (const TypeSpec* type : used_types()) {
      const std::vector<Profile>* const found = find_profiles(*type, request_.model);
      for (std::size_t p = 0; found != nullptr && p < found->size(); ++p) {
        if ((*found)[p].steps) most = std::max(most, (*found)[p].steps->variation.value_or(0));
      }
    }
    return most;
  }

  // How many times as long the period is as the longest stage. Groups of texts wait for one another: for two normal
  // times of one mean and deviation, the longer one is that deviation / sqrt(pi) above the mean (Clark 1961, The
  // Greatest of a Finite Set of Random Variables). A single group waits for no other.
  double waiting(double rows) const { return rows < texts_.streams ? 1 + variation_ * 0.5641895835477563 : 1; }

  std::vector<std::string> number_types_of_steps() {
    check_number_type(request_.dtype);
    if (!request_.choice) return {std::string(short_dtype(request_.dtype))};
    std::vector<std::string> found;
    for (const Conditions& offered : conditions()) {
      if (offered.first == 1) found.push_back(offered.second);
    }
    return found;
  }

  void add_step_setting(const std::string& dtype, double rows) {
    Setting setting;
    setting.batch_size = rows;
    setting.dtype = dtype;
    setting.element_bytes = find_number_type(dtype)->element_bytes;
    setting.waiting = texts_.alone ? 1 : waiting(rows);
    // Buffers are for the largest step.
    setting.buffers_in = request_.buffers_in * most_rows(texts_) / rows;
    setting.buffers_out = request_.buffers_out * most_rows(texts_) / rows;
    lengths_ = {{0, 1}};
    type_index_.emplace_back();
    for (const TypeSpec& type : types_.entries) {
      const Profile* const profile = step_profile(type, dtype);
      if (profile == nullptr) continue;
      add_profile(type, dtype, *profile, setting);
      DeviceType& own = setting.types.back();
      own.state_bytes = state_bytes(*profile->steps, *model_, texts_);
      if (profile->steps->load_s_per_byte) own.load_s_per_byte = *profile->steps->load_s_per_byte;
      set_rows(*profile, {rows, texts_.positions(), false}, setting, own);
      if (std::all_of(own.time_s.begin(), own.time_s.end(), [](double seconds) { return seconds == 0; })) {
        throw SpecError(types_name_ + ":" + std::to_string(profile->line) + ": " + printable(type.name) +
                        ": model_profiles: " + printable(request_.model) +
                        ": steps: no layer takes any time; measure them again (pipeedge profile)");
      }
    }
    problem_.settings.push_back(std::move(setting));
  }

  const Profile* step_profile(const TypeSpec& type, const std::string& dtype) const {
    const std::vector<Profile>* const found = find_profiles(type, request_.model);
    for (std::size_t p = 0; found != nullptr && p < found->size(); ++p) {
      if ((*found)[p].steps && short_dtype((*found)[p].dtype) == dtype) return &(*found)[p];
    }
    return nullptr;
  }

  // Sets what a step of so many rows costs on a type of a setting.
  void set_rows(const Profile& profile, const StepRows& rows, const Setting& setting, DeviceType& type) const {
    set_step_costs(*profile.steps, *model_, rows, type);
    type.receive_s = profile.receive_s;
    type.send_s = profile.send_s;
    type.input_send_s = type.output_receive_s = 0;
    const auto handling = profile.handling.find(request_.transport);
    if (handling != profile.handling.end()) add_handling(handling->second, problem_, setting, type);
  }

  // Embedding and head take memory of the data host. Then, other kinds of steps: that of a lone stream, and a chunk of a
  // prompt; or, where the plan is for a lone stream, those of all streams.
  void add_asides() {
    double head_s = 0;
    const StepCosts* steps = nullptr;
    const TypeSpec& spec = type_of_host(data_host_);
    for (Setting& setting : problem_.settings) {
      const Profile* const profile = step_profile(spec, setting.dtype);
      if (profile == nullptr) continue;
      head_s = std::max(head_s, first_head_s(*profile->steps));
      if (steps == nullptr) steps = &*profile->steps;
      int& own = setting.type_of[static_cast<std::size_t>(problem_.data_host)];
      DeviceType type = setting.types[static_cast<std::size_t>(own)];
      if (type.bids()) continue;
      type.name = spec.name + " (data host)";
      type.mem_bytes = std::max(0.0, type.mem_bytes - profile->steps->ends.mem_bytes);
      own = static_cast<int>(setting.types.size());
      setting.types.push_back(std::move(type));
    }
    add_prompts(steps, head_s);
    if (!texts_.alone) {
      problem_.asides.push_back(aside("token", {1, texts_.positions(), false}));
      problem_.asides.back().max_s = texts_.max_token_s;
    }
    // The limit counts chunks for as many stages as there may be; fewer have chunks with which they end sooner.
    problem_.asides.push_back(problem_.prompts.back());
    problem_.asides.back().max_s = texts_.max_first_token_s;
    if (!texts_.alone) return;
    for (const double groups : texts_.group_counts(problem_.host_count())) {
      const double rows = texts_.streams / groups;
      Aside group = aside(number_text(groups), {rows, texts_.positions(), false});
      if (texts_.min_tokens_per_s > 0) {
        group.max_s = texts_.streams / texts_.min_tokens_per_s;
        group.longest_limit_s = rows / texts_.min_tokens_per_s / waiting(rows);
      }
      problem_.either.push_back(std::move(group));
    }
  }

  // A prompt, and after a loss all tokens of all texts, half of whose answers are there on average: in chunks for each
  // number of stages, by what the data host takes for them.
  void add_prompts(const StepCosts* steps, double head_s) {
    constexpr int kMostStages = 8;
    constexpr double kPage = 32;  // tokens of a page of the cache
    const auto& windows = model_->windows;
    problem_.keeps_caches = std::all_of(windows.begin(), windows.end(), [](double window) { return window == 0; });
    problem_.partial_tokens = texts_.streams * std::min(texts_.positions(), kPage / 2);
    const int most = std::min({static_cast<int>(problem_.hosts.size()), problem_.layers(), kMostStages});
    const auto in_chunks = [&](const char* name, double tokens, double positions, int stages) {
      const double rows = chunk_rows(steps == nullptr ? StepCosts() : *steps, tokens, stages);
      Aside found = aside(name, {rows, positions, true});
      found.repeats = tokens / rows - 1;
      found.fixed_s = head_s;
      return found;
    };
    for (int stages = 1; stages <= most; ++stages) {
      problem_.prompts.push_back(in_chunks("prompt", texts_.prompt, texts_.prompt / 2, stages));
      if (!request_.losses) continue;
      problem_.again.push_back(in_chunks("again", texts_.streams * texts_.positions(), texts_.positions() / 2, stages));
    }
  }

  // Another kind of step on the same hosts.
  Aside aside(std::string name, const StepRows& rows) const {
    Aside aside;
    aside.name = std::move(name);
    for (const Setting& setting : problem_.settings) {
      if (aside.setting(setting.dtype) != nullptr) continue;
      Setting other = setting;
      other.batch_size = rows.rows;
      other.waiting = waiting(rows.rows);
      for (std::size_t host = 0; host < other.type_of.size(); ++host) {
        if (other.type_of[host] == Setting::kUnprofiled) continue;
        DeviceType& type = other.types[static_cast<std::size_t>(other.type_of[host])];
        const Profile* const profile = step_profile(type_of_host(problem_.hosts[host]), setting.dtype);
        if (profile != nullptr && !type.bids()) set_rows(*profile, rows, other, type);
      }
      aside.settings.push_back(std::move(other));
    }
    return aside;
  }

  void add_carried(Setting& setting) const {
    const Model mean = model_at(*model_, mean_tokens(lengths_));
    const auto part = [](double some, double most) { return most > 0 ? std::min(some / most, 1.0) : 1; };
    setting.carried.push_back(part(mean.elements_in, problem_.model.elements_in));
    for (std::size_t layer = 0; layer < mean.elements_out.size(); ++layer) {
      setting.carried.push_back(part(mean.elements_out[layer], problem_.model.elements_out[layer]));
    }
  }

  // Adds a type to a setting if it has a profile for it.
  void add_type(const TypeSpec& type, Setting& setting) {
    const auto given = dtype_of_.find(type.name);
    const std::string& dtype = given == dtype_of_.end() ? setting.dtype : given->second;
    const std::vector<Profile>* const found = find_profiles(type, request_.model);
    for (std::size_t p = 0; found != nullptr && p < found->size(); ++p) {
      const Profile& profile = (*found)[p];
      if (profile.batch_size != setting.batch_size || short_dtype(profile.dtype) != dtype) continue;
      if (!dtype_of_.empty() && given == dtype_of_.end()) {
        refused_.insert(type.name);
      } else {
        add_profile(type, dtype, profile, setting);
      }
    }
  }

  void add_profile(const TypeSpec& spec, const std::string& dtype, const Profile& profile, Setting& setting) {
    const std::size_t layers = problem_.model.mem_bytes.size();
    if (profile.time_s.size() != layers) {
      throw SpecError(types_name_ + ":" + std::to_string(profile.line) + ": " + printable(spec.name) +
                      ": model_profiles: " + printable(request_.model) + ": time_s: has " +
                      plural(profile.time_s.size(), "value") + " for " + plural(layers, "layer") + " (" + models_name_ +
                      ")");
    }
    if (const std::string why = request_.tokens > 0 ? why_unscaled(profile, request_.tokens) : ""; !why.empty()) {
      warn(types_name_ + ": " + printable(spec.name) + " " + why);
    }
    const bool scales = request_.tokens > 0 && !profile.lengths.empty();
    const Profile at = scales ? profile_at(profile, lengths_, request_.tokens) : profile;
    DeviceType type;
    type.name = spec.name;
    type.mem_bytes = spec.mem_bytes;
    type.bw_bytes_per_s = spec.bw_bytes_per_s;
    type.weight_bytes = weights_in(*find_number_type(dtype), profile, problem_.model);
    type.time_s = at.time_s;
    type.receive_s = at.receive_s;
    type.send_s = at.send_s;
    type.activation_bytes = at.activation_bytes;
    type.feed_s = at.feed_s.value_or(0);
    type.collect_s = at.collect_s.value_or(0);
    type.overhead_s = at.overhead_s.value_or(0);
    type.notes = {dtype, profile.threads, profile.kernels, lengths_of(profile)};
    set_watts(spec, profile.busy_w, type);
    const auto handling = profile.handling.find(request_.transport);
    if (handling != profile.handling.end()) add_handling(handling->second, problem_, setting, type);
    // A stage has the part of the loss that its layers are of the model.
    const double loss = request_.choice ? loss_of(spec, profile) : 0;
    if (loss > 0) type.loss.assign(layers, loss / static_cast<double>(layers));
    type_index_.back().emplace(spec.name, static_cast<int>(setting.types.size()));
    setting.types.push_back(std::move(type));
  }

  // Loss of the whole model by a profile; infinite if it is not known and matters.
  double loss_of(const TypeSpec& type, const Profile& profile) {
    const std::optional<double> agreement = agreement_of(profile);
    if (agreement) return std::max(0.0, 1 - *agreement);
    if (anything()) return kNominalLoss;
    warn(types_name_ + ": " + printable(type.name) + ": the profile of " +
         words({profile.batch_size, std::string(short_dtype(profile.dtype))}) +
         " has no agreement, so it is not used; measure it with pipeedge profile --agreement N, or allow it with "
         "--min-agreement 0");
    return kInfinity;
  }

  // The type of hosts in a setting; Setting::kUnprofiled if it has none.
  int type_in(std::size_t setting, const std::string& type) const {
    const auto found = type_index_[setting].find(type);
    return found == type_index_[setting].end() ? Setting::kUnprofiled : found->second;
  }

  void add_host(const std::string& host, const std::string& type) {
    host_index_.emplace(host, problem_.host_count());
    problem_.hosts.push_back(host);
    for (std::size_t s = 0; s < problem_.settings.size(); ++s) {
      problem_.settings[s].type_of.push_back(type_in(s, type));
    }
  }

  void add_hosts() {
    std::size_t listed = 0;
    for (const TypeHosts& entry : devices_.entries) {
      const std::vector<std::string> hosts = requested(entry.hosts);
      if (hosts.empty()) continue;
      listed += hosts.size();
      bool profiled = false;
      for (std::size_t s = 0; s < problem_.settings.size(); ++s) {
        profiled = profiled || type_in(s, entry.type) != Setting::kUnprofiled;
      }
      if (!profiled) leave_out(entry.type, hosts);
      for (std::size_t h = 0; h < hosts.size() && profiled; ++h) add_host(hosts[h], entry.type);
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
      const Setting& first = problem_.settings.front();
      const std::string lack = " has no profile for " + printable(request_.model) + ", batch size " +
                               number_text(first.batch_size) + ", dtype " + printable(first.dtype);
      why = "its type " + name + lack;
      // name_unprofiled() says it for all settings.
      if (!request_.choice) {
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

  // Where a setting does not have the data host, it gets a type without stages, as feeding and collecting use its
  // links.
  void set_data_host() {
    const std::string option = "--data-host " + printable(data_host_);
    for (const LeftOut& host : assembly_.left_out) {
      if (host.host != data_host_ || host_index_.count(host.host) != 0) continue;
      if (type_spec_.count(host.type) == 0) throw SpecError(option + ": " + host.why);
      add_host(host.host, host.type);
    }
    const auto found = host_index_.find(data_host_);
    if (found == host_index_.end()) {
      throw SpecError(option + ": no such host in " + devices_name_ +
                      ", which has: " + listing(printable_all(problem_.hosts)));
    }
    problem_.data_host = found->second;
    const std::size_t layers = problem_.model.mem_bytes.size();
    for (Setting& setting : problem_.settings) {
      int& own = setting.type_of[static_cast<std::size_t>(problem_.data_host)];
      if (own != Setting::kUnprofiled) continue;
      const TypeSpec& spec = type_of_host(data_host_);
      DeviceType type;
      type.name = spec.name + " (data host)";
      type.bw_bytes_per_s = spec.bw_bytes_per_s;
      set_watts(spec, std::nullopt, type);
      type.time_s.assign(layers, 0);
      type.stage_s.assign((layers + 1) * (layers + 1), kInfinity);
      own = static_cast<int>(setting.types.size());
      setting.types.push_back(std::move(type));
    }
  }

  const TypeSpec& type_of_host(const std::string& host) const {
    const auto entry = std::find_if(devices_.entries.begin(), devices_.entries.end(), [&](const TypeHosts& type) {
      return std::find(type.hosts.begin(), type.hosts.end(), host) != type.hosts.end();
    });
    return *type_spec_.at(entry->type);
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

  void add_widths() {
    const std::size_t cuts = problem_.model.mem_bytes.size() + 1;
    std::vector<std::string> unknown;
    problem_.widths.clear();
    for (const int bits : request_.choice->widths) {
      Width width;
      width.bits = bits;
      const auto found = model_->agreement_at_bits.find(bits);
      if (bits != 0 && found != model_->agreement_at_bits.end()) {
        width.loss.push_back(0);
        for (const double agreement : found->second) width.loss.push_back(1 - agreement);
        width.loss.push_back(0);
      } else if (bits != 0 && anything()) {
        width.loss.assign(cuts, nominal_loss(bits));
      } else if (bits != 0) {
        unknown.push_back(std::to_string(bits));
        continue;
      }
      problem_.widths.push_back(std::move(width));
    }
    if (!unknown.empty()) {
      warn(models_name_ + ": " + printable(model_->name) + ": agreement_at_bits lacks " + listing(unknown) +
           ", so links do not have these bits; measure them with pipeedge profile --sensitivity N, or allow them with "
           "--min-agreement 0");
    }
    if (problem_.widths.empty()) {
      throw SpecError(assembly_.warnings.back() + "; 0 (uncompressed) is not among --widths");
    }
  }

  // "A has no profile of microbatches of 4 in int8, ...": planned without them.
  void name_unprofiled() {
    std::set<Conditions> grid;
    for (const Setting& setting : problem_.settings) {
      grid.emplace(setting.batch_size, setting.dtype);
      for (const double size : request_.choice->batch_sizes) grid.emplace(size, setting.dtype);
      for (const std::string& dtype : request_.choice->dtypes) {
        grid.emplace(setting.batch_size, std::string(short_dtype(dtype)));
      }
    }
    for (const TypeSpec* type : used_types()) {
      std::vector<std::string> lacking;
      if (model_->context > 0) {
        std::set<std::string> dtypes;
        for (const Conditions& one : grid) dtypes.insert(one.second);
        for (const std::string& dtype : dtypes) {
          if (step_profile(*type, dtype) == nullptr) lacking.push_back(printable(dtype));
        }
        warn_of_lacking(*type, lacking);
        continue;
      }
      for (const Conditions& one : grid) {
        bool profiled = false;
        for (std::size_t s = 0; s < problem_.settings.size(); ++s) {
          const Setting& setting = problem_.settings[s];
          profiled = profiled || (Conditions(setting.batch_size, setting.dtype) == one &&
                                  type_in(s, type->name) != Setting::kUnprofiled);
        }
        if (!profiled) lacking.push_back(words(one));
      }
      warn_of_lacking(*type, lacking);
    }
  }

  void warn_of_lacking(const TypeSpec& type, const std::vector<std::string>& lacking) {
    if (lacking.empty()) return;
    warn(types_name_ + ": " + printable(type.name) + " has no profile of " + printable(request_.model) + " for " +
         listing(lacking) + "; planned without");
  }

  const Models& models_;
  const DeviceTypes& types_;
  const Devices& devices_;
  const Request& request_;
  const std::string models_name_, types_name_, devices_name_;  // for messages
  const ModelSpec* model_ = nullptr;
  std::map<std::string, std::string> dtype_of_;  // short names of the request, by device type
  std::unordered_map<std::string, const TypeSpec*> type_spec_;
  std::string data_host_;        // empty: none
  Texts texts_;                  // of a decoder
  double variation_ = 0;         // of its steps
  std::vector<Length> lengths_;  // of the microbatches of the setting that is being added
  Assembly assembly_;
  Problem& problem_ = assembly_.problem;
  std::vector<std::unordered_map<std::string, int>> type_index_;  // by setting: into its types
  std::set<std::string> refused_;                    // types whose profiles all have a dtype that is not allowed
  std::unordered_map<std::string, int> host_index_;  // into problem_.hosts
};

}  // namespace

Assembly assemble(const Models& models, const DeviceTypes& types, const Devices& devices, const Neighbors* neighbors,
                  const Request& request) {
  return Assembler(models, types, devices, request).assemble(neighbors);
}

}  // namespace pipeedge::yaml
