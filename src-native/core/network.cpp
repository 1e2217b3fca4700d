#include "network.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <utility>

namespace pipeedge {
namespace {

constexpr std::size_t kLargestTable = 1'000'000;

std::size_t at(int i) { return static_cast<std::size_t>(i); }

}  // namespace

Network::Network(const Instance& instance, const Limits& limits, std::optional<Amount> least)
    : instance_(instance), limits_(limits),
      // Finite, so that a link without bandwidth (infinite seconds) always exceeds it.
      longest_(std::min(loosened(limits.period_s / instance.waiting()), std::numeric_limits<double>::max())) {
  for (std::size_t number = 0; number < kAmounts; ++number) {
    const auto amount = static_cast<Amount>(number);
    place_[amount] = -1;
    most_[amount] = loosened(limits.most[amount]);
    const bool none = amount == kLoss && !instance.loses();
    if (none || (limits.most[amount] == kInfinity && least != amount)) continue;
    place_[amount] = count_++;
    active_.push_back(amount);
  }
  timed_ = place_[kSeconds] >= 0 || (place_[kScore] >= 0 && limits.score.second > 0);
  for (std::size_t amount = kAside; amount < kAmounts; ++amount) timed_ = timed_ || place_[amount] >= 0;
  for (std::size_t aside = 0; aside < instance.problem().asides.size(); ++aside) {
    longest_of_[aside] = loosened(instance.problem().asides[aside].longest_limit_s);
  }
  narrowest_ = place_[kLoss] < 0;
  linked_ = instance.pairwise() || instance.levels() > 1 || !active_.empty();
  by_reach_ = !linked_ && instance.nested() && instance.settings() == 1;
  std::vector<ModeStages> stages;
  stages.reserve(instance.modes().size());
  for (int mode = 0; mode < static_cast<int>(instance.modes().size()); ++mode) stages.push_back(collect(mode));
  if (linked_) {
    prepare_links();
    prepare_table();
  }
  add_resources(stages);
  add_arcs(stages);
  prepare_min_stages();
}

int Network::place(Amount amount) const { return place_[amount]; }

Network::ModeStages Network::collect(int mode) {
  const int layers = instance_.layers();
  std::vector<char> may_end(at(layers) + 1, 0);
  for (int cut = 1; cut <= layers; ++cut) {
    const double out = instance_.link_out(mode, cut);
    may_end[at(cut)] = out <= longest_ ? 1 : 0;
    note(out);
  }
  ModeStages found;
  auto& stages = found.stages;
  double amounts[kAmounts];
  for (int first = 0; first < layers; ++first) {
    const double in = instance_.link_in(mode, first);
    note(in);
    if (in > longest_) continue;
    const std::size_t row = stages.size();
    GrowingStage stage = instance_.stage_from(mode, first);
    for (int last = first + 1; last <= layers; ++last) {
      stage.add_layer();
      if (instance_.overfull(mode, stage)) break;
      // This stage and all longer ones.
      const double least =
          instance_.data_seconds(mode, first, layers) + (instance_.receive(mode, first) + stage.layers_s());
      if (least > longest_) {
        note(least);
        break;
      }
      const double compute = instance_.stage_seconds(mode, stage);
      const double busy = compute + instance_.data_seconds(mode, first, last);
      note(busy);
      if (busy > longest_ || may_end[at(last)] == 0) continue;
      const int room = instance_.room(mode, stage);
      if (room < 0 || !weigh(mode, stage, compute, amounts)) continue;
      // A longer stage is as good as a shorter one, unless it ends at a dearer cut than one it passes.
      while (by_reach_ && stages.size() > row) {
        bool dearer = false;
        for (int cut = stages.back().last; cut < last && last < layers && !dearer; ++cut) {
          dearer = instance_.dearer(last, cut);
        }
        if (dearer) break;
        stages.pop_back();
      }
      stages.push_back(
          {static_cast<std::int16_t>(first), static_cast<std::int16_t>(last), static_cast<std::int16_t>(room)});
      found.amounts.insert(found.amounts.end(), amounts, amounts + active());
    }
  }
  return found;
}

// Sets the active amounts of a stage. Returns false if no plan with it keeps the limits.
bool Network::weigh(int mode, const GrowingStage& stage, double compute_s, double* amounts) const {
  if (active_.empty()) return true;
  const bool begins = stage.first() == 0;
  const bool ends = stage.last() == layers();
  const double others_s = instance_.fastest(0, stage.first()) + instance_.fastest(stage.last(), layers());
  double seconds = compute_s;
  if (begins) seconds += instance_.link_from_data(mode);
  if (ends) seconds += instance_.link_to_data(mode);
  if (instance_.problem().returns()) {
    const bool away = instance_.mode(mode).cls != instance_.data_class();
    if (begins) seconds += instance_.data().feeding_s(away);
    if (ends) seconds += instance_.data().collecting_s(away);
  }
  for (std::size_t k = 0; k < active_.size(); ++k) {
    double rest = 0;  // lower bound for the rest of the plan
    switch (active_[k]) {
      case kLoss:
        amounts[k] = stage_loss(*instance_.mode(mode).type, stage.first(), stage.last());
        if (amounts[k] == kInfinity) return false;
        break;
      case kSeconds:
        amounts[k] = seconds;
        rest = others_s;
        break;
      case kScore: {
        const Score& score = limits_.score;
        const bool on_data = instance_.mode(mode).cls == instance_.data_class();
        amounts[k] = score.second * seconds;
        rest = score.second * others_s - (on_data ? 0 : score.elsewhere);
        // Every plan has one last stage, and at most one on the data host, which is a class of its own.
        if (ends) amounts[k] += score.elsewhere;
        if (on_data) amounts[k] -= score.elsewhere;
        if (score.joule > 0) amounts[k] += score.joule * joules(mode, compute_s, begins, ends);
        break;
      }
      default: {
        const int aside = active_[k] - kAside;
        const Instance::AsideStage stage_s = instance_.aside_stage(aside, mode, stage.first(), stage.last());
        amounts[k] = stage_s.latency_s;
        if (stage_s.longest_s > longest_of_[at(aside)]) return false;
        break;
      }
    }
    if (!(amounts[k] + rest <= most_[active_[k]])) return false;
  }
  return true;
}

// Sets the active amounts of a link. Returns false if no plan with it keeps the limits.
bool Network::weigh_hop(const Load& load, double seconds, const Speed& speed, double* amounts) const {
  for (std::size_t k = 0; k < active_.size(); ++k) {
    const Amount amount = active_[k];
    switch (amount) {
      case kLoss: amounts[k] = load.loss; break;
      case kSeconds: amounts[k] = seconds; break;
      case kScore: amounts[k] = limits_.score.second * seconds; break;
      default: {
        const int aside = amount - kAside;
        const double bytes = load.bytes * instance_.aside_bytes(aside);
        amounts[k] = bytes > 0 ? bytes * speed.s_per_byte + speed.latency_s : speed.latency_s;
        if (!(amounts[k] <= longest_of_[at(aside)])) return false;
        break;
      }
    }
    if (!(amounts[k] <= most_[amount])) return false;
  }
  return true;
}

// Joules of a stage and of the data host's links to it, besides those of an idle data host, which is on in any plan.
double Network::joules(int mode, double compute_s, bool begins, bool ends) const {
  const bool on_data = instance_.mode(mode).cls == instance_.data_class();
  const DeviceType& type = *instance_.mode(mode).type;
  return busy_joules(type, compute_s) + (on_data ? 0 : type.idle_w * limits_.score.period_s) +
         instance_.data().link_joules(!on_data && begins, !on_data && ends);
}

void Network::add_resources(const std::vector<ModeStages>& stages) {
  resource_of_class_.assign(at(instance_.classes()), -1);
  ends_.resize(stages.size());
  std::map<std::vector<std::pair<int, int>>, int> known;
  for (int m = 0; m < static_cast<int>(stages.size()); ++m) {
    const Mode& mode = instance_.mode(m);
    if (linked_) ends_[at(m)] = {-1, instance_.sender(mode), mode.group};
    if (stages[at(m)].stages.empty()) continue;
    int& resource = resource_of_class_[at(mode.cls)];
    if (resource < 0) {
      resource = resources();
      if (by_reach_) {
        std::vector<std::pair<int, int>> key;
        for (const Found& stage : stages[at(m)].stages) key.emplace_back(stage.first, stage.last);
        resource = known.emplace(std::move(key), resource).first->second;
      }
      if (resource == resources()) {
        capacity_.push_back(0);
        classes_of_.emplace_back();
      }
      capacity_[at(resource)] = std::min(capacity_[at(resource)] + instance_.count(mode.cls), layers());
      classes_of_[at(resource)].push_back(mode.cls);
    }
    ends_[at(m)].resource = resource;
  }
}

void Network::add_arcs(std::vector<ModeStages>& stages) {
  std::size_t count = 0;
  std::vector<char> stands(stages.size(), 1);  // whether a mode stands for its resource
  for (std::size_t m = 0; m < stages.size(); ++m) {
    if (ends_[m].resource < 0) continue;
    stands[m] = first_class(ends_[m].resource) == instance_.modes()[m].cls ? 1 : 0;
    if (stands[m] != 0) count += stages[m].stages.size();
  }
  arcs_.reserve(count);
  amounts_.reserve(count * active_.size());
  std::vector<std::size_t> next(stages.size(), 0);
  for (int cut = 0; cut < layers(); ++cut) {
    start_.push_back(static_cast<int>(arcs_.size()));
    for (std::size_t m = 0; m < stages.size(); ++m) {
      if (stands[m] == 0) continue;
      const auto& found = stages[m].stages;
      for (std::size_t& n = next[m]; n < found.size() && found[n].first == cut; ++n) {
        arcs_.push_back({static_cast<std::int32_t>(m), found[n].last, found[n].room});
        const double* amounts = stages[m].amounts.data() + n * active_.size();
        amounts_.insert(amounts_.end(), amounts, amounts + active_.size());
      }
    }
  }
  start_.push_back(static_cast<int>(arcs_.size()));
}

void Network::prepare_links() {
  std::set<double> sizes;  // of all links
  for (int level = 0; level < instance_.levels(); ++level) {
    for (int cut = 1; cut < layers(); ++cut) {
      const Load* const end = instance_.loads_end(level, cut);
      for (const Load* load = instance_.loads_begin(level, cut); load != end; ++load) sizes.insert(load->bytes);
    }
  }
  for (int from = 0; from < instance_.groups(); ++from) {
    for (int to = 0; to < instance_.groups(); ++to) {
      const LinkSpeed speed = instance_.speed(from, to);
      speeds_.push_back({speed.bw_bytes_per_s > 0 ? 1 / speed.bw_bytes_per_s : kInfinity, speed.latency_s});
      const auto seconds = [&](double bytes) { return link_seconds(bytes, speed.bw_bytes_per_s, speed.latency_s); };
      const auto longer =
          std::partition_point(sizes.begin(), sizes.end(), [&](double bytes) { return seconds(bytes) <= longest_; });
      if (longer != sizes.end()) note(seconds(*longer));
    }
  }
}

void Network::prepare_table() {
  if (at(layers()) * at(senders()) * at(groups()) > kLargestTable) return;
  std::vector<Hop> table;
  for (int cut = 0; cut < layers(); ++cut) {
    for (int sender = 0; sender < senders(); ++sender) {
      for (int group = 0; group < groups(); ++group) {
        hop_start_.push_back(static_cast<int>(table.size()));
        if (cut == 0) continue;
        compute_hops(cut, sender, group, [&](int width, const double* amounts) {
          Hop& hop = table.emplace_back();
          hop.width = width;
          std::copy_n(amounts, kAmounts, hop.amounts.begin());
        });
      }
    }
  }
  hop_start_.push_back(static_cast<int>(table.size()));
  table_ = std::move(table);
}

void Network::prepare_min_stages() {
  min_stages_.assign(at(layers()) + 1, layers() + 1);
  min_stages_[at(layers())] = 0;
  for (int cut = layers() - 1; cut >= 0; --cut) {
    for (int index = first_arc(cut); index < end_arc(cut); ++index) {
      min_stages_[at(cut)] = std::min(min_stages_[at(cut)], 1 + min_stages_[at(arc(index).to)]);
    }
  }
}

bool Network::allows(int mode, int first, int last) const {
  if (instance_.link_in(mode, first) > longest_ || instance_.link_out(mode, last) > longest_) return false;
  GrowingStage stage = instance_.stage_from(mode, first);
  while (stage.last() < last) {
    stage.add_layer();
    if (stage.layers_s() > longest_) return false;
  }
  return instance_.busy_seconds(mode, stage) <= longest_ && instance_.room(mode, stage) >= 0;
}

Path Network::path(const std::vector<Step>& steps) const {
  Path path;
  std::vector<int> used(at(instance_.classes()), 0);
  int cut = 0;
  for (const Step& step : steps) {
    const Arc& arc = this->arc(step.arc);
    int mode = arc.mode;
    for (const int cls : classes_of_[at(resource(arc))]) {
      // Only classes with a single mode are merged.
      if (cls != instance_.mode(mode).cls) mode = instance_.mode_of_class(cls);
      if (used[at(cls)] < instance_.count(cls)) break;
    }
    ++used[at(instance_.mode(mode).cls)];
    path.push_back({mode, cut, arc.to, step.width});
    cut = arc.to;
  }
  return path;
}

std::vector<Stage> stages_of(const Instance& instance, const Path& path) {
  std::vector<Stage> stages;
  std::vector<std::size_t> used(at(instance.classes()), 0);
  for (const PathStage& stage : path) {
    const Mode& mode = instance.mode(stage.mode);
    if (!stages.empty()) stages.back().width = stage.width;
    const int host = instance.hosts(mode.cls)[used[at(mode.cls)]++];
    stages.push_back({host, stage.first, stage.last, mode.setting, 0});
  }
  return stages;
}

}  // namespace pipeedge
