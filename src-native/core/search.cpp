#include "search.hpp"

#include <algorithm>
#include <cmath>

#include "counts.hpp"

namespace pipeedge {
namespace {

std::size_t at(int i) { return static_cast<std::size_t>(i); }

std::vector<int> capacities(const Network& network) {
  std::vector<int> found;
  for (int r = 0; r < network.resources(); ++r) found.push_back(std::min(network.capacity(r), network.layers()));
  return found;
}

struct Candidate {
  double excess = 0;              // the bound by the first prices minus the limit
  std::int32_t parent = -1;
  std::int32_t arc = -1;

  bool operator<(const Candidate& other) const {
    if (excess != other.excess) return excess < other.excess;
    if (parent != other.parent) return parent < other.parent;
    return arc < other.arc;
  }
};

class Search {
 public:
  Search(const Network& network, const std::vector<Prices>& prices, const SearchTask& task, const Clock& clock)
      : network_(network), prices_(prices), task_(task), clock_(clock), counts_(capacities(network)),
        kinds_(prices.size()), cutoff_(task.cutoff), pending_(at(network.layers()) + 1),
        scratch_(counts_.words(), 0) {
    set_limits();
  }

  SearchResult run() {
    SearchResult result;
    if (network_.min_stages(0) > task_.max_stages) {
      result.complete = true;
      return result;
    }
    add_label(nullptr, -1, -1);
    extend(0, 0, 0);
    for (int cut = 1; cut < network_.layers() && !stopped_ && !done(); ++cut) settle(cut);
    result.complete = !dropped_ && !stopped_;
    if (goal_parent_ >= 0) {
      std::vector<int> arcs{goal_arc_};
      for (std::int32_t label = goal_parent_; labels_[at(label)].arc >= 0; label = labels_[at(label)].parent) {
        arcs.push_back(labels_[at(label)].arc);
      }
      std::reverse(arcs.begin(), arcs.end());
      result.found = network_.path(arcs);
    }
    return result;
  }

 private:
  struct Label {
    std::int32_t parent = -1;
    std::int32_t arc = -1;
    std::int32_t stages = 0;
    std::int32_t sender = 0;
    double cost = 0;
  };

  bool latency() const { return std::isfinite(cutoff_); }
  bool done() const { return goal_parent_ >= 0 && !latency(); }

  void set_limits() {
    limits_.clear();
    for (const Prices& prices : prices_) {
      // Better than the cutoff by more than rounding or, for feasibility, not above it.
      const double limit = latency() ? prices.budget + cutoff_ - kRelativeTolerance * cutoff_ : prices.budget;
      limits_.push_back(limit + (latency() ? 0 : kRelativeTolerance * std::abs(limit)));
    }
  }

  const std::uint64_t* used(std::int32_t label) const { return used_.data() + at(label) * counts_.words(); }
  const double* paid(std::int32_t label) const { return paid_.data() + at(label) * kinds_; }

  void add_label(const std::uint64_t* counts, std::int32_t parent, std::int32_t arc) {
    Label label;
    label.parent = parent;
    label.arc = arc;
    if (parent < 0) {
      used_.resize(counts_.words(), 0);
      paid_.resize(kinds_, 0);
    } else {
      const Arc& taken = network_.arc(arc);
      label.stages = labels_[at(parent)].stages + 1;
      label.sender = taken.sender;
      label.cost = labels_[at(parent)].cost + step_cost(parent, taken);
      used_.insert(used_.end(), counts, counts + counts_.words());
      for (std::size_t k = 0; k < kinds_; ++k) {
        const double before = paid_[at(parent) * kinds_ + k];
        paid_.push_back(before + prices_[k].of[at(taken.resource)]);
      }
    }
    labels_.push_back(label);
  }

  // The link before the stage, and the stage itself.
  double step_cost(std::int32_t parent, const Arc& arc) const {
    const std::int32_t last = labels_[at(parent)].arc;
    if (last < 0) return arc.cost;
    const Arc& before = network_.arc(last);
    return network_.hop(before.sender, arc.cls, before.to) + arc.cost;
  }

  void extend(std::int32_t label, int cut, int sender) {
    const std::uint64_t* counts = used(label);
    const double* paid_here = paid(label);
    const double spent = labels_[at(label)].cost;
    const int stages = labels_[at(label)].stages + 1;
    const int layers = network_.layers();
    int index = network_.first_arc(cut);
    std::int32_t hop_cls = -1;
    double hop = 0;
    for (const Arc* arc = network_.begin(cut); arc != network_.end(cut); ++arc, ++index) {
      ++work_;
      if (stages + network_.min_stages(arc->to) > task_.max_stages) continue;
      if (cut > 0 && arc->cls != hop_cls) {
        hop_cls = arc->cls;
        hop = network_.hop(sender, hop_cls, cut);
      }
      const double cost = spent + hop + arc->cost;
      double excess = 0;
      bool hopeless = false;
      for (std::size_t k = 0; k < kinds_ && !hopeless; ++k) {
        const double bound = cost + paid_here[k] + prices_[k].of[at(arc->resource)] +
                             prices_[k].at(network_, arc->to, arc->sender);
        if (k == 0) excess = bound - limits_[0];
        hopeless = !(bound <= limits_[k]);
      }
      if (hopeless || counts_.full(counts, arc->resource)) continue;
      if (arc->to == layers) {
        if (latency() ? cost < cutoff_ - kRelativeTolerance * cutoff_ : goal_parent_ < 0) {
          goal_parent_ = label;
          goal_arc_ = index;
          if (latency()) {
            cutoff_ = cost;
            set_limits();
          } else {
            return;
          }
        }
        continue;
      }
      auto& waiting = pending_[at(arc->to)];
      waiting.push_back({excess, label, index});
      if (waiting.size() > 4096 + 16 * at(task_.width)) thin(waiting, 8 * at(task_.width));
    }
  }

  void thin(std::vector<Candidate>& waiting, std::size_t keep) {
    if (waiting.size() <= keep) return;
    std::nth_element(waiting.begin(), waiting.begin() + static_cast<std::ptrdiff_t>(keep), waiting.end());
    waiting.resize(keep);
    dropped_ = true;
  }

  // Chooses the labels of a cut and extends them.
  void settle(int cut) {
    std::vector<Candidate> waiting = std::move(pending_[at(cut)]);
    pending_[at(cut)].clear();
    std::sort(waiting.begin(), waiting.end());
    work_ += static_cast<std::int64_t>(waiting.size());
    const auto first = static_cast<std::int32_t>(labels_.size());
    for (const Candidate& candidate : waiting) {
      if (stopped_ || done()) return;
      const Arc& arc = network_.arc(candidate.arc);
      if (latency() && outdated(candidate, arc)) continue;
      std::copy_n(used(candidate.parent), counts_.words(), scratch_.begin());
      counts_.add(scratch_.data(), arc.resource);
      const double cost = labels_[at(candidate.parent)].cost + step_cost(candidate.parent, arc);
      if (dominated(first, arc.sender, cost)) continue;
      if (static_cast<int>(labels_.size()) - first >= task_.width) {
        dropped_ = true;
        break;
      }
      add_label(scratch_.data(), candidate.parent, candidate.arc);
      if (work_ > task_.max_work || ((labels_.size() & 255U) == 0 && clock_.expired())) stopped_ = true;
    }
    const auto last = static_cast<std::int32_t>(labels_.size());
    for (std::int32_t label = first; label < last && !stopped_ && !done(); ++label) {
      extend(label, cut, labels_[at(label)].sender);
      if (work_ > task_.max_work || ((label & 255) == 0 && clock_.expired())) stopped_ = true;
    }
  }

  // The cutoff has decreased since the candidate was recorded.
  bool outdated(const Candidate& candidate, const Arc& arc) const {
    const double bound = labels_[at(candidate.parent)].cost + step_cost(candidate.parent, arc) +
                         paid(candidate.parent)[0] + prices_[0].of[at(arc.resource)] +
                         prices_[0].at(network_, arc.to, arc.sender);
    return !(bound <= limits_[0]);
  }

  // Whether a label kept at this cut is at least as good as the one in scratch_.
  bool dominated(std::int32_t first, std::int32_t sender, double cost) {
    const auto last = static_cast<std::int32_t>(labels_.size());
    const std::uint64_t* counts = used_.data() + at(first) * counts_.words();
    std::int32_t label = first;
    for (; label < last; ++label, counts += counts_.words()) {
      const Label& other = labels_[at(label)];
      if (other.cost <= cost && other.sender == sender && counts_.covers(counts, scratch_.data())) break;
    }
    work_ += label - first;
    return label < last;
  }

  const Network& network_;
  const std::vector<Prices>& prices_;
  const SearchTask& task_;
  const Clock& clock_;
  const Counts counts_;
  const std::size_t kinds_;
  double cutoff_;
  std::vector<double> limits_;                 // by prices
  std::vector<std::vector<Candidate>> pending_;  // by cut
  std::vector<Label> labels_;
  std::vector<std::uint64_t> used_;            // [label][word]
  std::vector<double> paid_;                   // [label][prices]: price of its hosts
  std::vector<std::uint64_t> scratch_;
  std::int32_t goal_parent_ = -1;
  std::int32_t goal_arc_ = -1;
  std::int64_t work_ = 0;
  bool dropped_ = false;
  bool stopped_ = false;
};

}  // namespace

SearchResult search(const Network& network, const std::vector<Prices>& prices, const SearchTask& task,
                    const Clock& clock) {
  return Search(network, prices, task, clock).run();
}

}  // namespace pipeedge
