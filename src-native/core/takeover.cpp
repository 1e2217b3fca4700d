#include "takeover.hpp"

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <utility>

namespace pipeedge {
namespace {

constexpr double kSlower = 1.02;    // largest ratio of the objective to that of the best plan
constexpr double kUnnoticed = 1.1;  // periods between two results up to which a shorter time is worth nothing

std::size_t at(int i) { return static_cast<std::size_t>(i); }

const LoadedStage* loaded_on(const Before& before, int host) {
  const auto found = std::find_if(before.stages.begin(), before.stages.end(),
                                  [host](const LoadedStage& stage) { return stage.host == host; });
  return found == before.stages.end() ? nullptr : &*found;
}

const std::string& dtype_of(const Setting& setting, const DeviceType& type) {
  return type.notes.dtype.empty() ? setting.dtype : type.notes.dtype;
}

bool same_dtype(const LoadedStage& loaded, const std::string& dtype) {
  return loaded.dtype.empty() || dtype.empty() || loaded.dtype == dtype;
}

// The setting in which a host has loaded its layers: of those with the microbatch size of `setting`, if there is one.
int setting_of(const Problem& problem, const LoadedStage& loaded, int setting) {
  for (std::size_t s = 0; s < problem.settings.size(); ++s) {
    const Setting& one = problem.settings[s];
    const DeviceType* const type = one.type(loaded.host);
    if (one.batch_size != problem.setting(setting).batch_size || type == nullptr) continue;
    if (same_dtype(loaded, dtype_of(one, *type))) return static_cast<int>(s);
  }
  return setting;
}

bool is_kept(const Problem& problem, const LoadedStage& loaded, const Stage& stage) {
  const Setting& setting = problem.setting(stage.setting);
  return loaded.first == stage.first && loaded.last == stage.last &&
         same_dtype(loaded, dtype_of(setting, *setting.type(stage.host)));
}

// The weights that a host has of its next stage, which is in a setting. Layers that share weights are loaded together.
class KnownWeights {
 public:
  KnownWeights(const Problem& problem, const LoadedStage& loaded, int setting)
      : loaded_(loaded), weights_(weights_on(problem, *problem.setting(setting).type(loaded.host))) {
    const auto& shared = problem.model.shared_with;
    const bool shares = std::any_of(shared.begin(), shared.end(), [](int twin) { return twin != Model::kUnshared; });
    const Setting& own = problem.setting(setting);
    any_ = !shares && same_dtype(loaded, dtype_of(own, *own.type(loaded.host)));
  }

  // Bytes of those of a layer.
  double bytes(int layer) const {
    return any_ && loaded_.first <= layer && layer < loaded_.last ? weights_[at(layer)] : 0;
  }

 private:
  const LoadedStage& loaded_;
  const std::vector<double>& weights_;
  bool any_ = false;
};

double known_bytes(const Problem& problem, const LoadedStage& loaded, const Stage& stage) {
  const KnownWeights known(problem, loaded, stage.setting);
  double sum = 0;
  for (int l = stage.first; l < stage.last; ++l) sum += known.bytes(l);
  return sum;
}

double weight_bytes(const Problem& problem, const Stage& stage) {
  const std::vector<double>& weights = weights_on(problem, *problem.setting(stage.setting).type(stage.host));
  double sum = 0;
  for (int l = stage.first; l < stage.last; ++l) sum += weights[at(l)];
  return sum;
}

double load_bytes(const Problem& problem, const Before& before, const Stage& stage) {
  const LoadedStage* const loaded = loaded_on(before, stage.host);
  if (loaded == nullptr) return weight_bytes(problem, stage);
  if (is_kept(problem, *loaded, stage)) return 0;
  return weight_bytes(problem, stage) - known_bytes(problem, *loaded, stage);
}

// Memory of the layers that a host has loaded, with their buffers.
double held_bytes(const Problem& problem, const LoadedStage& loaded, int setting) {
  const Setting& own = problem.setting(setting);
  GrowingStage stage(problem, *own.type(loaded.host), loaded.first);
  while (stage.last() < loaded.last) stage.add_layer();
  return stage_bytes(problem, own, stage);
}

// Memory of the stage that runs on the host of another one, without the weights that both have.
double beside_bytes(const Problem& problem, const Before& before, const Stage& stage) {
  const LoadedStage* const loaded = before.runs ? loaded_on(before, stage.host) : nullptr;
  if (loaded == nullptr || is_kept(problem, *loaded, stage)) return 0;
  return held_bytes(problem, *loaded, setting_of(problem, *loaded, stage.setting)) -
         known_bytes(problem, *loaded, stage);
}

// What the host of a stage that runs holds besides each stage that may follow; empty if it has the memory for any that
// fits alone.
std::vector<double> table_beside(const Problem& problem, const LoadedStage& loaded, int setting) {
  const Setting& own = problem.setting(setting);
  const DeviceType& type = *own.type(loaded.host);
  double widest = 0;  // bytes of an element that arrives
  for (const Setting& other : problem.settings) {
    if (other.batch_size == own.batch_size) widest = std::max(widest, other.element_bytes);
  }
  const double held = held_bytes(problem, loaded, setting_of(problem, loaded, setting));
  const KnownWeights known(problem, loaded, setting);
  std::vector<double> table(at((problem.layers() + 1) * (problem.layers() + 1)), 0);
  bool narrows = false;
  for (int first = 0; first < problem.layers(); ++first) {
    GrowingStage stage(problem, type, first);
    const double arriving = cut_bytes(problem, own, first) * (first == 0 ? 1 : widest / own.element_bytes);
    double both = 0;  // bytes of weights that both stages have
    while (stage.last() < problem.layers()) {
      both += known.bytes(stage.last());
      stage.add_layer();
      if (stage.held_bytes() > loosened(type.mem_bytes)) break;
      const bool kept = is_kept(problem, loaded, {loaded.host, first, stage.last(), setting, 0});
      const double beside = kept ? 0 : held - both;
      const double buffers = own.buffers_in * arriving + own.buffers_out * cut_bytes(problem, own, stage.last());
      narrows = narrows || (beside > 0 && stage.held_bytes() + buffers + beside > loosened(type.mem_bytes));
      table[type.stage_index(first, stage.last())] = beside;
    }
  }
  return narrows ? table : std::vector<double>();
}

// The cheapest assignment of columns to rows, each at most once; there are at least as many columns. The Hungarian
// method with shortest augmenting paths.
std::vector<int> assigned(const std::vector<std::vector<double>>& costs) {
  const std::size_t rows = costs.size();
  const std::size_t columns = costs.front().size();
  std::vector<double> row_price(rows + 1, 0);
  std::vector<double> column_price(columns + 1, 0);
  std::vector<std::size_t> row_of(columns + 1, 0);  // from 1; 0: free
  for (std::size_t row = 1; row <= rows; ++row) {
    std::vector<double> least(columns + 1, kInfinity);
    std::vector<std::size_t> from(columns + 1, 0);
    std::vector<char> done(columns + 1, 0);
    std::size_t column = 0;
    row_of[0] = row;
    while (row_of[column] != 0) {
      done[column] = 1;
      const std::size_t here = row_of[column];
      std::size_t next = 0;
      double step = kInfinity;
      for (std::size_t c = 1; c <= columns; ++c) {
        if (done[c] != 0) continue;
        const double reduced = costs[here - 1][c - 1] - row_price[here] - column_price[c];
        if (reduced < least[c]) {
          least[c] = reduced;
          from[c] = column;
        }
        if (least[c] < step) {
          step = least[c];
          next = c;
        }
      }
      for (std::size_t c = 0; c <= columns; ++c) {
        if (done[c] != 0) {
          row_price[row_of[c]] += step;
          column_price[c] -= step;
        } else {
          least[c] -= step;
        }
      }
      column = next;
    }
    for (; column != 0; column = from[column]) row_of[column] = row_of[from[column]];
  }
  std::vector<int> column_of(rows, 0);
  for (std::size_t c = 1; c <= columns; ++c) {
    if (row_of[c] != 0) column_of[row_of[c] - 1] = static_cast<int>(c - 1);
  }
  return column_of;
}

// The plan with equivalent hosts exchanged, so that these load the fewest bytes; of such plans, one in which most hosts
// stay where they are.
std::vector<Stage> with_exchanged_hosts(const Problem& problem, const Before& before, std::vector<Stage> stages) {
  if (!problem.links.empty()) return stages;  // the links of each host are its own
  std::map<std::vector<int>, std::vector<int>> classes;
  for (int host = 0; host < problem.host_count(); ++host) {
    if (host == problem.data_host) continue;  // its own work counts
    std::vector<int> types;
    for (const Setting& setting : problem.settings) types.push_back(setting.type_of[at(host)]);
    classes[std::move(types)].push_back(host);
  }
  for (const auto& [types, members] : classes) {
    std::vector<std::size_t> places;
    for (std::size_t s = 0; s < stages.size(); ++s) {
      if (std::find(members.begin(), members.end(), stages[s].host) != members.end()) places.push_back(s);
    }
    if (places.empty() || members.size() < 2) continue;
    std::vector<std::vector<double>> costs;
    for (const std::size_t place : places) {
      costs.emplace_back();
      for (const int host : members) {
        Stage there = stages[place];
        there.host = host;
        const double moved = host == stages[place].host ? 0 : 1e-3;  // less than any byte
        costs.back().push_back(load_bytes(problem, before, there) + moved);
      }
    }
    const std::vector<int> chosen = assigned(costs);
    for (std::size_t p = 0; p < places.size(); ++p) stages[places[p]].host = members[at(chosen[p])];
  }
  return stages;
}

// Whether hosts have caches, and lose those of layers that they do not keep.
bool has_caches(const Problem& problem) { return problem.keeps_caches && !problem.prompts.empty(); }

class Follower {
 public:
  Follower(const Problem& problem, const Before& before, const Options& options, const std::vector<Stage>& found)
      : problem_(problem), before_(before), options_(options), links_(problem), found_(found),
        best_(evaluate(problem, links_, found)), running_(plan_that_runs()) {
    limit_s_ = kSlower * best_.period_s / problem.setting(found.front().setting).waiting;
    if (running_) running_costs_ = evaluate(problem, links_, *running_);
  }

  std::vector<Stage> follow() const {
    if (running_ && keeps_limits(running_costs_) && value(running_costs_) <= loosened(value(best_))) return *running_;
    std::vector<Stage> chosen = found_;
    Cost least = cost(found_, best_);
    for (const std::vector<int>& hosts : orders()) {
      const std::optional<std::vector<Stage>> stages = cut(hosts);
      if (!stages) continue;
      Costs costs = evaluate(problem_, links_, *stages);
      add_before(problem_, before_, *stages, costs);
      if (!costs.fits() || !keeps_limits(costs) || value(costs) > loosened(kSlower * value(best_))) continue;
      const Cost now = cost(*stages, costs);
      if (now < least) {
        chosen = *stages;
        least = now;
      }
    }
    return chosen;
  }

 private:
  // What a change to a plan costs, the most important first: the time without a result as far as it is noticed, the
  // bytes that the host with the most to load has to load, and those of all together.
  using Cost = std::array<double, 3>;

  // The running plan, if all of its hosts are there and it has a number type for each that the problem knows.
  std::optional<std::vector<Stage>> plan_that_runs() const {
    if (!before_.runs) return std::nullopt;
    std::vector<Stage> stages;
    for (const LoadedStage& loaded : before_.stages) {
      if (loaded.host == LoadedStage::kGone) return std::nullopt;
      const int setting = setting_of(problem_, loaded, found_.front().setting);
      const DeviceType* const type = problem_.setting(setting).type(loaded.host);
      if (type == nullptr || !same_dtype(loaded, dtype_of(problem_.setting(setting), *type))) return std::nullopt;
      stages.push_back({loaded.host, loaded.first, loaded.last, setting, loaded.width});
    }
    return stages;
  }

  double value(const Costs& costs) const {
    switch (options_.objective) {
      case Objective::kLatency: return costs.latency_s;
      case Objective::kEnergy: return costs.joules.value_or(kInfinity);
      case Objective::kThroughput: break;
    }
    return costs.period_s;
  }

  bool keeps_limits(const Costs& costs) const {
    const double size = problem_.setting(found_.front().setting).batch_size;
    return keeps_asides(problem_, costs) && costs.loss <= loosened(problem_.max_loss) &&
           costs.latency_s <= loosened(problem_.max_latency_s) &&
           costs.period_s * options_.min_items_per_s <= loosened(size);
  }

  Cost cost(const std::vector<Stage>& stages, const Costs& costs) const {
    Cost sum{0, 0, 0};
    if (running_) sum[0] = std::max(kUnnoticed * running_costs_.period_s, handover_s(stages, costs));
    for (const Stage& stage : stages) {
      const double bytes = load_bytes(problem_, before_, stage);
      sum[1] = std::max(sum[1], bytes);
      sum[2] += bytes;
    }
    return sum;
  }

  // Seconds between the last result of the running plan and the first of another one. A host computes what there is of
  // the running plan first. That nothing waits before its stages is the worst case: microbatches that wait leave time
  // to the first one of the other plan.
  double handover_s(const std::vector<Stage>& stages, const Costs& costs) const {
    std::map<int, double> free_s;  // when each host has computed all of the running plan
    double last_s = 0;
    for (std::size_t s = 0; s < running_->size(); ++s) {
      last_s += running_costs_.stages[s].compute_s;
      free_s[(*running_)[s].host] = last_s;
      if (s + 1 < running_->size()) last_s += running_costs_.stages[s].link_out_s;
    }
    double first_s = 0;
    for (std::size_t s = 0; s < stages.size(); ++s) {
      const auto free = free_s.find(stages[s].host);
      first_s = std::max(first_s, free == free_s.end() ? 0 : free->second) + costs.stages[s].compute_s;
      if (s + 1 < stages.size()) first_s += costs.stages[s].link_out_s;
    }
    return first_s - last_s;
  }

  // The orders of the hosts of the plan in which those of the one before keep theirs, if at most one is new.
  std::vector<std::vector<int>> orders() const {
    const auto uses = [&](int host) {
      return std::any_of(found_.begin(), found_.end(), [&](const Stage& stage) { return stage.host == host; });
    };
    std::vector<int> kept;
    std::vector<LoadedStage> loaded_in_order = before_.stages;
    std::stable_sort(loaded_in_order.begin(), loaded_in_order.end(),
                     [](const LoadedStage& a, const LoadedStage& b) { return a.first < b.first; });
    for (const LoadedStage& loaded : loaded_in_order) {
      if (loaded.host != LoadedStage::kGone && uses(loaded.host)) kept.push_back(loaded.host);
    }
    if (kept.size() == found_.size()) return {kept};
    if (kept.size() + 1 < found_.size()) return {};
    const auto joins = std::find_if(found_.begin(), found_.end(),
                                    [&](const Stage& stage) { return loaded_on(before_, stage.host) == nullptr; });
    std::vector<std::vector<int>> found;
    for (std::size_t place = 0; place < found_.size(); ++place) {
      found.push_back(kept);
      found.back().insert(found.back().begin() + static_cast<std::ptrdiff_t>(place), joins->host);
    }
    return found;
  }

  // The stages of hosts in a given order, within the limit and near to what they hold. Each host keeps its number type,
  // and each place its bits.
  std::optional<std::vector<Stage>> cut(const std::vector<int>& hosts) const {
    const int layers = problem_.layers();
    const int count = static_cast<int>(hosts.size());
    std::vector<int> earliest(hosts.size() + 1, layers);  // where each can begin, if all that follow are to be in time
    for (int h = count - 1; h > 0; --h) earliest[at(h)] = first_layer(hosts[at(h)], earliest[at(h + 1)]);
    std::vector<Stage> stages;
    int start = 0;
    for (int h = 0; h < count; ++h) {
      const int host = hosts[at(h)];
      const int least = std::max(start + 1, earliest[at(h + 1)]);
      const int most = std::min(last_layer(host, start), layers - (count - h - 1));
      if (least > most) return std::nullopt;
      const LoadedStage* const own = loaded_on(before_, host);
      const LoadedStage* const next = h + 1 < count ? loaded_on(before_, hosts[at(h + 1)]) : nullptr;
      const int liked = own != nullptr ? own->last : next != nullptr ? next->first : layers;
      const int stop = std::min(std::max(liked, least), most);
      stages.push_back({host, start, stop, stage_on(host).setting, found_[at(h)].width});
      start = stop;
    }
    return start == layers ? std::optional(stages) : std::nullopt;
  }

  const Stage& stage_on(int host) const {
    return *std::find_if(found_.begin(), found_.end(), [&](const Stage& stage) { return stage.host == host; });
  }

  // Whether a host has the memory for a stage, and computes it within the limit.
  bool in_time(int host, int first, int last) const {
    const Setting& setting = problem_.setting(stage_on(host).setting);
    const DeviceType& type = *setting.type(host);
    GrowingStage stage(problem_, type, first);
    while (stage.last() < last) stage.add_layer();
    if (!type.bids() && stage_bytes(problem_, setting, stage) > loosened(type.mem_bytes)) return false;
    double seconds =
        stage.seconds(receive_seconds(problem_, type, host, first), send_seconds(problem_, type, host, last));
    if (host == problem_.data_host) {
      seconds += data_host_of(problem_, setting.batch_size).total_s(first > 0, last < problem_.layers());
    }
    return seconds <= limit_s_;
  }

  // The start of the longest stage before `stop` that a host computes in time; or `stop`.
  int first_layer(int host, int stop) const {
    int start = stop;
    while (start > 0 && in_time(host, start - 1, stop)) --start;
    return start;
  }

  // The end of the longest stage from `start` on that a host computes in time; or `start`.
  int last_layer(int host, int start) const {
    int stop = start;
    while (stop < problem_.layers() && in_time(host, start, stop + 1)) ++stop;
    return stop;
  }

  const Problem& problem_;
  const Before& before_;
  const Options& options_;
  LinkTable links_;
  const std::vector<Stage>& found_;
  Costs best_;
  std::optional<std::vector<Stage>> running_;
  Costs running_costs_;
  double limit_s_ = 0;
};

}  // namespace

std::vector<double> stage_table(const Problem& problem, int host, int setting) {
  const Setting& own = problem.setting(setting);
  const DeviceType& type = *own.type(host);
  std::vector<double> seconds(at((problem.layers() + 1) * (problem.layers() + 1)), kInfinity);
  for (int first = 0; first < problem.layers(); ++first) {
    GrowingStage stage(problem, type, first);
    while (stage.last() < problem.layers()) {
      stage.add_layer();
      if (stage_bytes(problem, own, stage) > loosened(type.mem_bytes)) continue;
      seconds[type.stage_index(first, stage.last())] =
          stage.seconds(receive_seconds(problem, type, host, first), send_seconds(problem, type, host, stage.last()));
    }
  }
  return seconds;
}

Problem beside(const Problem& problem, const Before& before) {
  Problem narrowed = problem;
  for (const LoadedStage& loaded : before.stages) {
    if (!before.runs || loaded.host == LoadedStage::kGone) continue;
    for (std::size_t s = 0; s < problem.settings.size(); ++s) {
      const DeviceType* const type = problem.settings[s].type(loaded.host);
      if (type == nullptr || type->bids()) continue;
      std::vector<double> table = table_beside(problem, loaded, static_cast<int>(s));
      if (table.empty()) continue;
      Setting& setting = narrowed.settings[s];
      setting.type_of[at(loaded.host)] = static_cast<int>(setting.types.size());
      setting.types.push_back(*type);
      setting.types.back().beside_bytes = std::move(table);
    }
  }
  return narrowed;
}

void add_before(const Problem& problem, const Before& before, const std::vector<Stage>& stages, Costs& costs) {
  for (std::size_t s = 0; s < stages.size(); ++s) {
    costs.stages[s].beside_bytes = beside_bytes(problem, before, stages[s]);
    costs.stages[s].load_bytes = load_bytes(problem, before, stages[s]);
  }
}

std::vector<Stage> follow(const Problem& problem, const Before& before, const Options& options,
                          const std::vector<Stage>& found) {
  if (!before.known()) return found;
  std::vector<Stage> exchanged = with_exchanged_hosts(problem, before, found);
  if (!before.runs && !has_caches(problem)) return exchanged;
  Costs costs = evaluate(problem, exchanged);
  add_before(problem, before, exchanged, costs);
  if (!costs.fits()) exchanged = found;
  return Follower(problem, before, options, exchanged).follow();
}

}  // namespace pipeedge
