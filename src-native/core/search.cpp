#include "search.hpp"

#include <algorithm>
#include <cmath>

#include "counts.hpp"

namespace pipeedge {
namespace {

std::size_t at(int i) { return static_cast<std::size_t>(i); }

std::vector<int> capacities(const Network& network) {
  std::vector<int> found;
  for (int r = 0; r < network.resources(); ++r) found.push_back(network.capacity(r));
  return found;
}

struct Candidate {
  double bound = 0;  // by the first prices
  std::int32_t parent = -1;
  Step step;

  bool operator<(const Candidate& other) const {
    if (bound != other.bound) return bound < other.bound;
    if (parent != other.parent) return parent < other.parent;
    if (step.arc != other.step.arc) return step.arc < other.step.arc;
    return step.width < other.step.width;
  }
};

using Candidates = std::vector<Candidate>;

class Search {
 public:
  Search(const Network& network, const std::vector<Prices>& prices, const SearchTask& task, const Clock& clock)
      : network_(network), prices_(prices), task_(task), clock_(clock), counts_(capacities(network)),
        kinds_(prices.size()), active_(at(network.active())), least_(task.least ? network.place(*task.least) : -1),
        pending_(at(network.layers()) + 1), scratch_(counts_.words(), 0) {
    for (std::size_t k = 0; k < active_; ++k) {
      most_[k] = loosened(network.limits().most[network.amount(static_cast<int>(k))]);
    }
    if (least_ >= 0) most_[at(least_)] = std::min(most_[at(least_)], task.most);
    set_budgets();
  }

  SearchResult run() {
    SearchResult result;
    if (network_.min_stages(0) > task_.max_stages) {
      result.complete = true;
      return result;
    }
    labels_.emplace_back();
    amounts_.resize(active_, 0);
    used_.resize(counts_.words(), 0);
    paid_.resize(kinds_, 0);
    extend(0, 0);
    for (int cut = 1; cut < network_.layers() && !stopped_ && !done(); ++cut) settle(cut);
    result.complete = !dropped_ && !stopped_;
    if (goal_parent_ >= 0) {
      std::vector<Step> steps{goal_};
      for (std::int32_t label = goal_parent_; label > 0; label = labels_[at(label)].parent) {
        steps.push_back(labels_[at(label)].step);
      }
      std::reverse(steps.begin(), steps.end());
      result.found = network_.path(steps);
      result.least = reached_;
    }
    return result;
  }

 private:
  struct Label {
    std::int32_t parent = -1;
    std::int32_t stages = 0;
    std::int32_t sender = 0;
    Step step;
  };

  bool done() const { return goal_parent_ >= 0 && least_ < 0; }

  void set_budgets() {
    budgets_.clear();
    for (const Prices& prices : prices_) {
      double budget = prices.budget;
      for (std::size_t k = 0; k < active_; ++k) {
        if (prices.of_active[k] > 0) budget += prices.of_active[k] * most_[k];
      }
      budgets_.push_back(budget + 10 * kRelativeTolerance * prices.budget);
    }
  }

  // What plans without amounts do not have costs them no memory.
  const double* amounts(std::int32_t label) const { return amounts_.data() + at(label) * active_; }
  const std::uint64_t* used(std::int32_t label) const { return used_.data() + at(label) * counts_.words(); }

  bool exhausted() {
    if (work_ > task_.max_work || ((++ticks_ & 127) == 0 && clock_.expired())) stopped_ = true;
    return stopped_;
  }

  void extend(std::int32_t label, int cut) {
    const Label from = labels_[at(label)];
    if (cut == 0 || !network_.linked()) {
      int width = 0;
      if (cut > 0) network_.hops(cut, 0, 0, [&](int only, const double*) { width = only; });
      follow(label, width, amounts(label), network_.first_arc(cut), network_.end_arc(cut));
      return;
    }
    const int level = from.sender % network_.levels();
    for (int begin = network_.first_arc(cut), end = begin; begin < network_.end_arc(cut) && !done(); begin = end) {
      // All arcs of one group, by each link to it.
      const int group = network_.group(network_.arc(begin));
      while (end < network_.end_arc(cut) && network_.group(network_.arc(end)) == group) ++end;
      network_.hops(cut, from.sender, group, [&](int width, const double* amounts) {
        double before[kAmounts] = {};
        for (std::size_t k = 0; k < active_; ++k) before[k] = this->amounts(label)[k] + amounts[k];
        for (std::size_t p = 0; p < kinds_; ++p) link_[p] = prices_[p].of(network_, amounts);
        follow(label, width, before, begin, end, level);
      });
    }
  }

  // Adds the plans that go on by arcs [begin, end), after a link of `link_`, if there is one.
  void follow(std::int32_t label, int width, const double* before, int begin, int end, int level = -1) {
    const std::uint64_t* counts = used(label);
    const double* paid = paid_.data() + at(label) * kinds_;
    const int stages = labels_[at(label)].stages + 1;
    for (int index = begin; index < end; ++index) {
      const Arc& arc = network_.arc(index);
      ++work_;
      if (arc.room < level || stages + network_.min_stages(arc.to) > task_.max_stages) continue;
      const double* amounts = network_.amounts(index);
      bool hopeless = counts_.full(counts, network_.resource(arc));
      for (std::size_t k = 0; k < active_ && !hopeless; ++k) hopeless = !(before[k] + amounts[k] <= most_[k]);
      double bound = 0;
      for (std::size_t p = 0; p < kinds_ && !hopeless; ++p) {
        const double sum = paid[p] + (level < 0 ? 0 : link_[p]) + prices_[p].of_arc(network_, index) +
                           prices_[p].at(network_, arc.to, network_.sender(arc));
        if (p == 0) bound = sum;
        hopeless = !(sum <= budgets_[p]);
      }
      if (hopeless) continue;
      if (arc.to == network_.layers()) {
        reach(label, {index, width}, before, amounts);
        if (done()) return;
        continue;
      }
      auto& waiting = pending_[at(arc.to)];
      waiting.push_back({bound, label, {index, width}});
      if (waiting.size() > 4096 + 16 * at(task_.width)) thin(waiting, 8 * at(task_.width));
    }
  }

  // A plan is complete. Only better ones matter from now on.
  void reach(std::int32_t label, Step step, const double* before, const double* more) {
    goal_parent_ = label;
    goal_ = step;
    if (least_ < 0) return;
    reached_ = before[least_] + more[least_];
    most_[at(least_)] = just_below(reached_);
    set_budgets();
  }

  void thin(Candidates& waiting, std::size_t keep) {
    std::nth_element(waiting.begin(), waiting.begin() + static_cast<std::ptrdiff_t>(keep), waiting.end());
    waiting.resize(keep);
    dropped_ = true;
  }

  // Puts about as many of the least candidates as can become labels in order; returns where the others begin.
  Candidates::iterator sort_next(Candidates::iterator begin, Candidates::iterator end) const {
    const auto end_of_part = begin + std::min<std::ptrdiff_t>(end - begin, 2 * std::ptrdiff_t{task_.width});
    if (end_of_part != end) std::nth_element(begin, end_of_part, end);
    std::sort(begin, end_of_part);
    return end_of_part;
  }

  // Chooses the labels of a cut and extends them.
  void settle(int cut) {
    Candidates waiting = std::move(pending_[at(cut)]);
    pending_[at(cut)].clear();
    work_ += static_cast<std::int64_t>(waiting.size());
    const auto first = static_cast<std::int32_t>(labels_.size());
    first_words_.clear();
    auto sorted = waiting.begin();
    for (auto candidate = waiting.begin(); candidate != waiting.end(); ++candidate) {
      if (candidate == sorted) sorted = sort_next(sorted, waiting.end());
      // The budget may have decreased since the candidate was recorded.
      if (!(candidate->bound <= budgets_[0])) break;
      if (static_cast<int>(labels_.size()) - first >= task_.width) {
        dropped_ = true;
        break;
      }
      keep(*candidate, first);
      if (exhausted()) return;
    }
    const auto last = static_cast<std::int32_t>(labels_.size());
    for (std::int32_t label = first; label < last && !done(); ++label) {
      extend(label, cut);
      if (exhausted()) return;
    }
  }

  // Makes a label of a candidate, unless a label at this cut is at least as good.
  void keep(const Candidate& candidate, std::int32_t first) {
    const Arc& arc = network_.arc(candidate.step.arc);
    const Label& parent = labels_[at(candidate.parent)];
    const Label label{candidate.parent, parent.stages + 1, network_.sender(arc), candidate.step};
    double sums[kAmounts] = {};
    std::copy_n(amounts(candidate.parent), active_, sums);
    for (std::size_t p = 0; p < kinds_; ++p) link_[p] = 0;
    if (candidate.parent > 0 && active_ > 0) {
      network_.hops(cut_of(parent), parent.sender, network_.group(arc), [&](int width, const double* amounts) {
        if (width != candidate.step.width) return;
        for (std::size_t k = 0; k < active_; ++k) sums[k] += amounts[k];
        for (std::size_t p = 0; p < kinds_; ++p) link_[p] = prices_[p].of(network_, amounts);
      });
    }
    const double* more = network_.amounts(candidate.step.arc);
    for (std::size_t k = 0; k < active_; ++k) sums[k] += more[k];
    std::copy_n(used(candidate.parent), counts_.words(), scratch_.begin());
    counts_.add(scratch_.data(), network_.resource(arc));
    if (dominated(first, label, sums)) return;
    labels_.push_back(label);
    amounts_.insert(amounts_.end(), sums, sums + active_);
    used_.insert(used_.end(), scratch_.begin(), scratch_.end());
    first_words_.push_back(scratch_.front());
    for (std::size_t p = 0; p < kinds_; ++p) {
      const double before = paid_[at(candidate.parent) * kinds_ + p];
      paid_.push_back(before + link_[p] + prices_[p].of_arc(network_, candidate.step.arc));
    }
  }

  int cut_of(const Label& label) const { return network_.arc(label.step.arc).to; }

  // Whether a label kept at this cut is at least as good as this one, whose counts are in scratch_.
  bool dominated(std::int32_t first, const Label& label, const double* sums) {
    const std::size_t kept = first_words_.size();
    const std::uint64_t word = scratch_.front();
    std::size_t other = 0;
    for (; other < kept; ++other) {
      if (!counts_.covers_first(first_words_[other], word)) continue;
      if (!counts_.covers_rest(used(first + static_cast<std::int32_t>(other)), scratch_.data())) continue;
      if (!network_.linked()) break;
      const std::int32_t known = first + static_cast<std::int32_t>(other);
      bool as_good = true;
      for (std::size_t k = 0; k < active_ && as_good; ++k) as_good = amounts(known)[k] <= sums[k];
      if (as_good && network_.instance().as_good(labels_[at(known)].sender, label.sender)) break;
    }
    work_ += static_cast<std::int64_t>(other);
    return other < kept;
  }

  const Network& network_;
  const std::vector<Prices>& prices_;
  const SearchTask& task_;
  const Clock& clock_;
  const Counts counts_;
  const std::size_t kinds_;
  const std::size_t active_;
  const int least_;                                            // its place among the active amounts; -1: none
  std::array<double, kAmounts> most_{};                        // of the active amounts
  std::vector<double> budgets_;                                // by prices
  std::vector<double> link_ = std::vector<double>(kinds_, 0);  // price of a link, by prices
  std::vector<Candidates> pending_;                            // by cut
  std::vector<Label> labels_;
  std::vector<double> amounts_;             // [label][active amount]
  std::vector<std::uint64_t> used_;         // [label][word]
  std::vector<std::uint64_t> first_words_;  // of the labels of the cut that is being settled
  std::vector<double> paid_;                // [label][prices]: price of its hosts and amounts
  std::vector<std::uint64_t> scratch_;
  std::int32_t goal_parent_ = -1;
  Step goal_;
  double reached_ = kInfinity;  // the goal's amount to be made small
  std::int64_t work_ = 0;
  unsigned ticks_ = 0;
  bool dropped_ = false;
  bool stopped_ = false;
};

}  // namespace

SearchResult search(const Network& network, const std::vector<Prices>& prices, const SearchTask& task,
                    const Clock& clock) {
  return Search(network, prices, task, clock).run();
}

}  // namespace pipeedge
