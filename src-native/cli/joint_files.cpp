#include "joint_files.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <utility>

#include "../yaml/wording.hpp"

namespace pipeedge::cli {
namespace {

using yaml::printable;

// A microbatch size and a number type, as profiles have them.
using Conditions = std::pair<double, std::string>;

std::string words(const Conditions& conditions) {
  return "microbatches of " + yaml::number_text(conditions.first) + " in " + printable(conditions.second);
}

// Agreement of a profile with float32, if known.
std::optional<double> agreement_of(const yaml::Profile& profile) {
  return yaml::short_dtype(profile.dtype) == "float32" ? 1 : profile.agreement;
}

// Losses of number types that were not measured only rank plans that are otherwise equal.
constexpr double kNominalLoss = 0.01;
double nominal_loss(int bits) { return 0.5 / (std::pow(2.0, bits) - 1); }

class JointAssembly {
 public:
  JointAssembly(const yaml::Models& models, const yaml::DeviceTypes& types, const yaml::Devices& devices,
                const yaml::Neighbors* neighbors, const yaml::Request& base, const JointRequest& request)
      : models_(models), types_(types), devices_(devices), neighbors_(neighbors), base_(base), request_(request),
        anything_(request.min_agreement <= 0) {}

  NamedJoint make() {
    joint_.model = base_.model;
    joint_.losses_known = !anything_;
    joint_.problem.max_loss = anything_ ? kInfinity : 1 - request_.min_agreement;
    joint_.problem.max_latency_s = request_.max_latency_s;
    find_conditions();
    for (const Conditions& one : offered_) add_setting(one);
    add_links();
    add_widths();
    name_unprofiled();
    name_left_out();
    return std::move(joint_);
  }

 private:
  std::string types_name() const { return printable(types_.name(), 400); }

  // Device types with hosts to plan on.
  std::vector<const yaml::TypeSpec*> used_types() const {
    std::vector<const yaml::TypeSpec*> used;
    for (const yaml::TypeSpec& type : types_.entries) {
      for (const yaml::TypeHosts& entry : devices_.entries) {
        if (entry.type == type.name && std::any_of(entry.hosts.begin(), entry.hosts.end(), [&](const auto& host) {
              return wanted(host);
            })) {
          used.push_back(&type);
        }
      }
    }
    return used;
  }
  bool wanted(const std::string& host) const {
    return base_.hosts.empty() || std::find(base_.hosts.begin(), base_.hosts.end(), host) != base_.hosts.end();
  }

  bool asked_for(const yaml::Profile& profile) const {
    const auto& sizes = request_.batch_sizes;
    const auto same = [&](const std::string& dtype) {
      return yaml::short_dtype(dtype) == yaml::short_dtype(profile.dtype);
    };
    return (sizes.empty() || std::find(sizes.begin(), sizes.end(), profile.batch_size) != sizes.end()) &&
           (request_.dtypes.empty() || std::any_of(request_.dtypes.begin(), request_.dtypes.end(), same));
  }

  void find_conditions() {
    for (const yaml::TypeSpec* type : used_types()) {
      const std::vector<yaml::Profile>* const profiles = yaml::find_profiles(*type, base_.model);
      if (profiles == nullptr) continue;
      for (const yaml::Profile& profile : *profiles) {
        if (!asked_for(profile)) continue;
        const Conditions one{profile.batch_size, std::string(yaml::short_dtype(profile.dtype))};
        offered_.insert(one);
        profiled_[type->name].emplace(one, &profile);
      }
    }
    if (!offered_.empty()) return;
    // The message about a single microbatch size and number type names what there is.
    yaml::Request single = base_;
    if (!request_.batch_sizes.empty()) single.batch_size = request_.batch_sizes.front();
    if (!request_.dtypes.empty()) single.dtype = request_.dtypes.front();
    yaml::assemble(models_, types_, devices_, neighbors_, single);
    throw yaml::SpecError(types_name() + ": no profile of " + printable(base_.model) +
                          " has a requested microbatch size and number type");
  }

  void add_setting(const Conditions& conditions) {
    yaml::Request request = base_;
    request.batch_size = conditions.first;
    request.dtype = conditions.second;
    request.names_unprofiled = false;
    yaml::Assembly assembly = yaml::assemble(models_, types_, devices_, neighbors_, request);
    Setting setting;
    setting.dtype = conditions.second;
    const std::size_t layers = assembly.problem.model.mem_bytes.size();
    for (std::size_t t = 0; t < assembly.problem.types.size(); ++t) {
      const double loss = loss_of(assembly.problem.types[t].name, conditions);
      // A stage has the part of the loss that its layers are of the model.
      if (loss > 0) assembly.notes[t].loss.assign(layers, loss / static_cast<double>(layers));
      setting.loss.push_back(assembly.notes[t].loss);
    }
    setting.problem = std::move(assembly.problem);
    joint_.problem.settings.push_back(std::move(setting));
    joint_.notes.push_back(std::move(assembly.notes));
    for (std::string& warning : assembly.warnings) warn(std::move(warning));
    for (yaml::LeftOut& host : assembly.left_out) left_out_[host.host].push_back(std::move(host));
  }

  // Links between hosts that no number type was profiled on both of; each setting has those of its own hosts.
  void add_links() {
    if (neighbors_ == nullptr) return;
    std::vector<std::set<std::string>> together;
    for (const Setting& setting : joint_.problem.settings) {
      together.emplace_back();
      for (const Host& host : setting.problem.hosts) together.back().insert(host.name);
    }
    const std::vector<std::string> names = host_names(joint_.problem);
    const std::set<std::string> known(names.begin(), names.end());
    for (const yaml::HostNeighbors& entry : neighbors_->entries) {
      for (const yaml::NeighborSpec& link : entry.links) {
        const auto has_both = [&](const std::set<std::string>& hosts) {
          return hosts.count(entry.from) != 0 && hosts.count(link.to) != 0;
        };
        if (!has_both(known) || std::any_of(together.begin(), together.end(), has_both)) continue;
        joint_.problem.links.push_back({entry.from, link.to, link.bw_bytes_per_s, link.latency_s});
      }
    }
  }

  // Loss of the whole model on a type; infinite if it is not known and matters.
  double loss_of(const std::string& type, const Conditions& conditions) {
    const auto profiles = profiled_.find(type);
    if (profiles == profiled_.end()) return 0;  // the data host's
    const auto profile = profiles->second.find(conditions);
    if (profile == profiles->second.end()) return 0;
    const std::optional<double> agreement = agreement_of(*profile->second);
    if (agreement) return std::max(0.0, 1 - *agreement);
    if (anything_) return kNominalLoss;
    warn(types_name() + ": " + printable(type) + ": the profile of " + words(conditions) +
         " has no agreement, so it is not used; measure it with profiler.py --agreement N, or allow it with "
         "--min-agreement 0");
    return kInfinity;
  }

  void add_widths() {
    const yaml::ModelSpec& model = *yaml::find_model(models_, base_.model);
    const std::size_t cuts = model.model.mem_bytes.size() + 1;
    std::vector<std::string> unknown;
    for (const int bits : request_.widths) {
      Width width;
      width.bits = bits;
      const auto found = model.agreement_at_bits.find(bits);
      if (bits != 0 && found != model.agreement_at_bits.end()) {
        width.loss.push_back(0);
        for (const double agreement : found->second) width.loss.push_back(1 - agreement);
        width.loss.push_back(0);
      } else if (bits != 0 && anything_) {
        width.loss.assign(cuts, nominal_loss(bits));
      } else if (bits != 0) {
        unknown.push_back(std::to_string(bits));
        continue;
      }
      joint_.problem.widths.push_back(std::move(width));
    }
    if (!unknown.empty()) {
      warn(printable(models_.name(), 400) + ": " + printable(model.name) + ": agreement_at_bits lacks " +
           yaml::listing(unknown) + ", so links do not have these bits; measure them with profiler.py --sensitivity N, "
           "or allow them with --min-agreement 0");
    }
    if (joint_.problem.widths.empty()) {
      throw yaml::SpecError(joint_.warnings.back() + "; 0 (uncompressed) is not among --widths");
    }
  }

  // "A has no profile of microbatches of 4 in int8, ...": planned without them.
  void name_unprofiled() {
    std::set<Conditions> grid = offered_;
    for (const double size : request_.batch_sizes) {
      for (const auto& [other, dtype] : offered_) grid.emplace(size, dtype);
    }
    for (const std::string& dtype : request_.dtypes) {
      for (const auto& [size, other] : offered_) grid.emplace(size, std::string(yaml::short_dtype(dtype)));
    }
    for (const yaml::TypeSpec* type : used_types()) {
      std::vector<std::string> lacking;
      for (const Conditions& one : grid) {
        if (profiled_[type->name].count(one) == 0) lacking.push_back(words(one));
      }
      if (!lacking.empty()) {
        warn(types_name() + ": " + printable(type->name) + " has no profile of " + printable(base_.model) + " for " +
             yaml::listing(lacking) + "; planned without");
      }
    }
  }

  // Hosts that no setting can use.
  void name_left_out() {
    for (auto& [host, entries] : left_out_) {
      if (entries.size() == offered_.size()) joint_.left_out.push_back(std::move(entries.front()));
    }
  }

  void warn(std::string text) {
    auto& warnings = joint_.warnings;
    if (std::find(warnings.begin(), warnings.end(), text) == warnings.end()) warnings.push_back(std::move(text));
  }

  const yaml::Models& models_;
  const yaml::DeviceTypes& types_;
  const yaml::Devices& devices_;
  const yaml::Neighbors* neighbors_;
  const yaml::Request& base_;
  const JointRequest& request_;
  const bool anything_;
  NamedJoint joint_;
  std::set<Conditions> offered_;
  std::map<std::string, std::map<Conditions, const yaml::Profile*>> profiled_;  // by device type
  std::map<std::string, std::vector<yaml::LeftOut>> left_out_;                  // by host
};

}  // namespace

NamedJoint joint_of_files(const yaml::Models& models, const yaml::DeviceTypes& types, const yaml::Devices& devices,
                          const yaml::Neighbors* neighbors, const yaml::Request& base, const JointRequest& joint) {
  return JointAssembly(models, types, devices, neighbors, base, joint).make();
}

}  // namespace pipeedge::cli
