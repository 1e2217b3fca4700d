#include "reasons.hpp"

#include <algorithm>
#include <vector>

#include "links.hpp"

namespace pipeedge {
namespace {

constexpr double kQuickly = 2;    // seconds for an easier problem
constexpr double kPlenty = 1e18;  // bytes per second
constexpr double kTrial = 0.1;    // seconds for a trial of the bisection

// Calls visit(setting, type) for each setting that has a host.
template <typename Visit>
void for_settings(const Problem& problem, int host, Visit visit) {
  for (const Setting& setting : problem.settings) {
    if (const DeviceType* type = setting.type(host)) visit(setting, *type);
  }
}

double memory_of(const Problem& problem, int host) {
  double most = 0;
  for_settings(problem, host, [&](const Setting&, const DeviceType& type) { most = std::max(most, type.mem_bytes); });
  return most;
}

bool only_bids(const Problem& problem, int host) {
  bool bids = true;
  for_settings(problem, host, [&](const Setting&, const DeviceType& type) { bids = bids && type.bids(); });
  return bids;
}

// Smallest size of a layer's weights anywhere, beside those of the layer that it shares them with.
double least_weights(const Problem& problem, std::size_t layer) {
  double least = kInfinity;
  const std::vector<int>& shared = problem.model.shared_with;
  const int twin = shared.empty() ? Model::kUnshared : shared[layer];
  for (int host = 0; host < problem.host_count(); ++host) {
    for_settings(problem, host, [&](const Setting&, const DeviceType& type) {
      const std::vector<double>& sizes = weights_on(problem, type);
      const double held = twin == Model::kUnshared ? 0 : sizes[static_cast<std::size_t>(twin)];
      least = std::min(least, std::max(0.0, sizes[layer] - held));
    });
  }
  return least;
}

// Whether a layer fits on no host; then sets what the host that lacks the least memory needs and has.
bool fits_nowhere(const Problem& problem, int layer, WhyNone& why) {
  double missing = kInfinity;
  for (int host = 0; host < problem.host_count(); ++host) {
    for_settings(problem, host, [&](const Setting& setting, const DeviceType& type) {
      const double needed = layer_bytes(problem, setting, type, layer);
      if (!(needed - type.mem_bytes < missing)) return;
      missing = needed - type.mem_bytes;
      why.layer = layer;
      why.needed_bytes = needed;
      why.free_bytes = type.mem_bytes;
    });
  }
  return missing > 0;
}

// The smallest factor of all hosts' memory that makes the problem feasible, by bisection; 0 if memory does
// not help. Undecided trials count as infeasible, so the result may be too large.
double memory_factor(const Problem& problem) {
  Options options;
  options.time_limit_s = kTrial;
  const auto feasible = [&](double factor) {
    Problem larger = problem;
    for (Setting& setting : larger.settings) {
      for (DeviceType& type : setting.types) type.mem_bytes *= factor;
    }
    return !solve(larger, options).stages.empty();
  };
  double enough = 1;
  for (int doublings = 0; !feasible(enough); ++doublings, enough *= 2) {
    if (doublings == 20) return 0;
  }
  double short_of = enough / 2;
  for (int i = 0; i < 8; ++i) {
    const double middle = (short_of + enough) / 2;
    (feasible(middle) ? enough : short_of) = middle;
  }
  return enough;
}

// Which of the limits excludes all plans, if it is one of them.
bool exceeds_limit(const Problem& problem, const Options& options, WhyNone& why) {
  Options quick = options;
  quick.time_limit_s = std::min(options.time_limit_s, kQuickly);
  if (options.objective == Objective::kEnergy) {
    quick.objective = Objective::kThroughput;
    const Solution fastest = solve(problem, quick);
    why.kind = WhyNone::Kind::kThroughput;
    why.items_per_s = fastest.items_per_s();
    if (!fastest.stages.empty()) return true;
  }
  Problem freed = problem;
  freed.max_loss = kInfinity;
  why.kind = WhyNone::Kind::kLoss;
  if (problem.max_loss < kInfinity && !solve(freed, quick).stages.empty()) return true;
  freed = problem;
  freed.either.clear();
  for (Aside& aside : freed.asides) aside.max_s = kInfinity;
  const auto limited = [](const Aside& aside) { return aside.limits(); };
  why.kind = WhyNone::Kind::kAside;
  if (std::any_of(problem.asides.begin(), problem.asides.end(), limited) ||
      std::any_of(problem.either.begin(), problem.either.end(), limited)) {
    if (!solve(freed, quick).stages.empty()) return true;
  }
  freed = problem;
  freed.max_latency_s = kInfinity;
  why.kind = WhyNone::Kind::kLatency;
  if (problem.max_latency_s == kInfinity) return false;
  const Solution slower = solve(freed, quick);
  why.latency_s = slower.latency_s;
  return !slower.stages.empty();
}

}  // namespace

WhyNone why_no_plan(const Problem& problem, const Options& options) {
  WhyNone why;
  const auto because = [&](WhyNone::Kind kind) {
    why.kind = kind;
    return why;
  };
  if (problem.hosts.empty()) return because(WhyNone::Kind::kNoHost);
  if (exceeds_limit(problem, options, why)) return why;
  bool bids = true;
  double available = 0;
  for (int host = 0; host < problem.host_count(); ++host) {
    bids = bids && only_bids(problem, host);
    available += memory_of(problem, host);
  }
  if (bids) return because(WhyNone::Kind::kBids);
  double weights = 0;
  for (int l = 0; l < problem.layers(); ++l) {
    weights += least_weights(problem, static_cast<std::size_t>(l));
    if (fits_nowhere(problem, l, why)) return because(WhyNone::Kind::kLayer);
  }
  why.needed_bytes = weights;
  why.free_bytes = available;
  if (weights > available) return because(WhyNone::Kind::kMemory);
  Problem connected = problem;
  for (Setting& setting : connected.settings) {
    for (DeviceType& type : setting.types) type.bw_bytes_per_s = kPlenty;
  }
  for (Link& link : connected.links) link.bw_bytes_per_s = kPlenty;
  Options quick;
  quick.time_limit_s = kQuickly;
  if (!solve(connected, quick).stages.empty()) return because(WhyNone::Kind::kLinks);
  why.factor = memory_factor(connected);
  return because(why.factor > 0 ? WhyNone::Kind::kBuffers : WhyNone::Kind::kCut);
}

WhyUnused why_unused(const Problem& problem, int host, Objective objective, const Solution& solution) {
  WhyUnused why;
  why.needed_bytes = kInfinity;
  why.free_bytes = memory_of(problem, host);
  double fastest = kInfinity;
  double total = kInfinity;
  double smallest_cut = kInfinity;  // bytes of the cheapest cut inside the model
  double bandwidth = 0;
  for_settings(problem, host, [&](const Setting& setting, const DeviceType& type) {
    double sum = 0;
    for (int l = 0; l < problem.layers(); ++l) {
      const double seconds = type.time_s[static_cast<std::size_t>(l)];
      why.needed_bytes = std::min(why.needed_bytes, layer_bytes(problem, setting, type, l));
      if (setting.batch_size != solution.batch_size) continue;
      fastest = std::min(fastest, seconds * setting.waiting);
      sum += seconds;
      for (const Width& width : problem.widths) {
        if (l == 0 || !useful(setting, width.bits)) continue;
        smallest_cut = std::min(smallest_cut, link_bytes(problem, setting, width.bits, l));
      }
    }
    bandwidth = type.bw_bytes_per_s;
    if (setting.batch_size == solution.batch_size) total = std::min(total, sum);
  });
  const auto because = [&](WhyUnused::Kind kind, double seconds) {
    why.kind = kind;
    why.seconds = seconds;
    return why;
  };
  if (why.needed_bytes > why.free_bytes) return because(WhyUnused::Kind::kMemory, 0);
  const bool by_type = problem.links.empty();
  if (by_type && bandwidth <= 0 && smallest_cut > 0) return because(WhyUnused::Kind::kNoBandwidth, 0);
  if (objective == Objective::kThroughput) {
    if (fastest >= solution.period_s) return because(WhyUnused::Kind::kSlow, fastest);
    const double link = link_seconds(smallest_cut, bandwidth, 0);
    if (by_type && link >= solution.period_s && total >= solution.period_s) {
      return because(WhyUnused::Kind::kSlowLink, link);
    }
  }
  return because(solution.status == Status::kOptimal ? WhyUnused::Kind::kNotNeeded : WhyUnused::Kind::kUndecided, 0);
}

}  // namespace pipeedge
