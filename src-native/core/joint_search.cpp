#include "joint_search.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "counts.hpp"

namespace pipeedge {
namespace {

std::size_t at(int i) { return static_cast<std::size_t>(i); }

std::vector<int> capacities(const JointInstance& instance) {
  std::vector<int> found;
  for (int cls = 0; cls < instance.classes(); ++cls) {
    found.push_back(std::min(instance.count(cls), instance.layers()));
  }
  return found;
}

struct Candidate {
  double excess = 0;              // the bound by the first prices minus the budget
  std::int32_t parent = -1;
  JointStep step;

  bool operator<(const Candidate& other) const {
    if (excess != other.excess) return excess < other.excess;
    if (parent != other.parent) return parent < other.parent;
    if (step.arc != other.step.arc) return step.arc < other.step.arc;
    return step.hop < other.step.hop;
  }
};

class JointSearch {
 public:
  JointSearch(const JointNetwork& network, const std::vector<JointPrices>& prices, const JointSearchTask& task,
              const Clock& clock)
      : network_(network), instance_(network.instance()), prices_(prices), task_(task), clock_(clock),
        counts_(capacities(instance_)), kinds_(prices.size()), pending_(at(network.layers()) + 1),
        scratch_(counts_.words(), 0) {
    for (std::size_t k = 0; k < kAmounts; ++k) most_[k] = with_tolerance(network.limits().most[k]);
    for (const JointPrices& price : prices_) {
      budgets_.push_back(price.budget + std::abs(price.budget) * 10 * kRelativeTolerance);
    }
  }

  JointSearchResult run() {
    used_.resize(counts_.words(), 0);
    paid_.resize(kinds_, 0);
    labels_.emplace_back();
    extend(0, 0);
    for (int cut = 1; cut < network_.layers() && !stopped_ && !done(); ++cut) settle(cut);
    JointSearchResult result;
    result.complete = !dropped_ && !stopped_;
    if (goal_parent_ < 0) return result;
    JointPath path{goal_};
    for (std::int32_t label = goal_parent_; label > 0; label = labels_[at(label)].parent) {
      path.push_back(labels_[at(label)].step);
    }
    std::reverse(path.begin(), path.end());
    result.found = std::move(path);
    return result;
  }

 private:
  struct Label {
    std::int32_t parent = -1;
    std::int32_t sender = 0;
    JointStep step;
    Amounts amount{};
  };

  bool done() const { return goal_parent_ >= 0 && !task_.least; }
  const std::uint64_t* used(std::int32_t label) const { return used_.data() + at(label) * counts_.words(); }

  void extend(std::int32_t label, int cut) {
    const int sender = labels_[at(label)].sender;
    const int level = cut == 0 ? 0 : instance_.level_of(sender);
    int index = network_.first_arc(cut);
    while (index < network_.end_arc(cut) && !done()) {
      // All arcs of one group, by each link to it.
      const int group = network_.arc(index).group;
      int end = index;
      while (end < network_.end_arc(cut) && network_.arc(end).group == group) ++end;
      if (cut == 0) {
        follow(label, -1, index, end, 0);
      } else {
        for (int hop = network_.first_hop(cut, sender, group); hop < network_.end_hop(cut, sender, group); ++hop) {
          follow(label, hop, index, end, level);
        }
      }
      index = end;
    }
  }

  void follow(std::int32_t label, int hop, int begin, int end, int level) {
    const std::uint64_t* counts = used(label);
    Amounts before = labels_[at(label)].amount;
    if (hop >= 0) {
      for (std::size_t k = 0; k < kAmounts; ++k) before[k] += network_.hop(hop).amount[k];
    }
    const std::size_t senders = at(instance_.senders());
    for (int index = begin; index < end; ++index) {
      const JointArc& arc = network_.arc(index);
      ++work_;
      if (arc.room < level || counts_.full(counts, arc.cls) || !within(before, arc.amount)) continue;
      double excess = 0;
      bool hopeless = false;
      for (std::size_t k = 0; k < kinds_ && !hopeless; ++k) {
        const JointPrices& prices = prices_[k];
        const double bound = paid_[at(label) * kinds_ + k] + prices.of(arc) +
                             (hop < 0 ? 0 : prices.of(network_.hop(hop).amount)) +
                             prices.rest[at(arc.to) * senders + at(arc.sender)];
        if (k == 0) excess = bound - prices.budget;
        hopeless = !(bound <= budgets_[k]);
      }
      if (hopeless) continue;
      if (arc.to == network_.layers()) {
        reach(label, {index, hop}, before, arc.amount);
        if (done()) return;
        continue;
      }
      auto& waiting = pending_[at(arc.to)];
      waiting.push_back({excess, label, {index, hop}});
      if (waiting.size() > 4096 + 16 * at(task_.width)) thin(waiting, 8 * at(task_.width));
    }
  }

  bool within(const Amounts& before, const Amounts& more) const {
    for (std::size_t k = 0; k < kAmounts; ++k) {
      if (before[k] + more[k] > most_[k]) return false;
    }
    return true;
  }

  // A plan is complete. Only better ones matter from now on.
  void reach(std::int32_t label, JointStep step, const Amounts& before, const Amounts& more) {
    goal_parent_ = label;
    goal_ = step;
    if (!task_.least) return;
    const std::size_t k = *task_.least;
    const double reached = before[k] + more[k];
    const double better = reached - std::abs(reached) * kRelativeTolerance;
    most_[k] = reached > 0 ? better : -1;
    for (std::size_t p = 0; p < kinds_; ++p) {
      const double unit = prices_[p].of_amount[k];
      if (unit > 0) budgets_[p] = std::min(budgets_[p], lowered(p, k, most_[k]));
    }
  }

  // The budget of prices, with another limit for one amount.
  double lowered(std::size_t p, std::size_t k, double most) const {
    const double budget = prices_[p].budget + prices_[p].of_amount[k] * (most - network_.limits().most[k]);
    return budget + prices_[p].budget * 10 * kRelativeTolerance;
  }

  void thin(std::vector<Candidate>& waiting, std::size_t keep) {
    std::nth_element(waiting.begin(), waiting.begin() + static_cast<std::ptrdiff_t>(keep), waiting.end());
    waiting.resize(keep);
    dropped_ = true;
  }

  Amounts amounts(const Candidate& candidate) const {
    Amounts sum = labels_[at(candidate.parent)].amount;
    const JointArc& arc = network_.arc(candidate.step.arc);
    for (std::size_t k = 0; k < kAmounts; ++k) {
      sum[k] += arc.amount[k] + (candidate.step.hop < 0 ? 0 : network_.hop(candidate.step.hop).amount[k]);
    }
    return sum;
  }

  // Chooses the labels of a cut and extends them.
  void settle(int cut) {
    std::vector<Candidate> waiting = std::move(pending_[at(cut)]);
    pending_[at(cut)].clear();
    std::sort(waiting.begin(), waiting.end());
    work_ += static_cast<std::int64_t>(waiting.size());
    const auto first = static_cast<std::int32_t>(labels_.size());
    for (const Candidate& candidate : waiting) {
      if (static_cast<int>(labels_.size()) - first >= task_.width) {
        dropped_ = true;
        break;
      }
      keep(candidate, first);
      if (exhausted()) return;
    }
    const auto last = static_cast<std::int32_t>(labels_.size());
    for (std::int32_t label = first; label < last && !done(); ++label) {
      extend(label, cut);
      if (exhausted()) return;
    }
  }

  bool exhausted() {
    if (work_ > task_.max_work || (++ticks_ % 64 == 0 && clock_.expired())) stopped_ = true;
    return stopped_;
  }

  void keep(const Candidate& candidate, std::int32_t first) {
    const JointArc& arc = network_.arc(candidate.step.arc);
    std::copy_n(used(candidate.parent), counts_.words(), scratch_.begin());
    counts_.add(scratch_.data(), arc.cls);
    const Amounts amount = amounts(candidate);
    if (dominated(first, arc.sender, amount)) return;
    labels_.push_back({candidate.parent, arc.sender, candidate.step, amount});
    used_.insert(used_.end(), scratch_.begin(), scratch_.end());
    for (std::size_t k = 0; k < kinds_; ++k) {
      const double before = paid_[at(candidate.parent) * kinds_ + k];
      const double link = candidate.step.hop < 0 ? 0 : prices_[k].of(network_.hop(candidate.step.hop).amount);
      paid_.push_back(before + link + prices_[k].of(arc));
    }
  }

  // Whether a label kept at this cut is at least as good as the one in scratch_.
  bool dominated(std::int32_t first, std::int32_t sender, const Amounts& amount) {
    const auto last = static_cast<std::int32_t>(labels_.size());
    const std::uint64_t* counts = used_.data() + at(first) * counts_.words();
    std::int32_t label = first;
    for (; label < last; ++label, counts += counts_.words()) {
      const Label& other = labels_[at(label)];
      if (counts_.covers(counts, scratch_.data()) && no_larger(other.amount, amount) &&
          instance_.as_good(other.sender, sender)) {
        break;
      }
    }
    work_ += label - first;
    return label < last;
  }

  // Amounts that nothing limits do not matter.
  bool no_larger(const Amounts& amount, const Amounts& than) const {
    for (std::size_t k = 0; k < kAmounts; ++k) {
      const bool matters = !std::isinf(most_[k]) || (task_.least && k == *task_.least);
      if (matters && amount[k] > than[k]) return false;
    }
    return true;
  }

  const JointNetwork& network_;
  const JointInstance& instance_;
  const std::vector<JointPrices>& prices_;
  const JointSearchTask& task_;
  const Clock& clock_;
  const Counts counts_;
  const std::size_t kinds_;
  Amounts most_{};
  std::vector<double> budgets_;                // by prices
  std::vector<std::vector<Candidate>> pending_;  // by cut
  std::vector<Label> labels_;
  std::vector<std::uint64_t> used_;            // [label][word]
  std::vector<double> paid_;                   // [label][prices]
  std::vector<std::uint64_t> scratch_;
  std::int32_t goal_parent_ = -1;
  JointStep goal_;
  std::int64_t work_ = 0;
  int ticks_ = 0;
  bool dropped_ = false;
  bool stopped_ = false;
};

}  // namespace

JointSearchResult search(const JointNetwork& network, const std::vector<JointPrices>& prices,
                         const JointSearchTask& task, const Clock& clock) {
  return JointSearch(network, prices, task, clock).run();
}

}  // namespace pipeedge
