// Why there is no plan, and why a plan does not use a host: facts, without words.
#pragma once

#include "costs.hpp"
#include "problem.hpp"

namespace pipeedge {

struct WhyNone {
  enum class Kind {
    kNoHost,      // there are no hosts
    kBids,        // no chain of bids covers the layers
    kLayer,       // one layer fits on no host: `layer` needs needed_bytes, the host has free_bytes
    kMemory,      // all hosts have free_bytes, the layers need needed_bytes without buffers
    kLinks,       // with links that carry everything, there is a plan
    kBuffers,     // ... if each host has `factor` of its memory
    kCut,         // ... not even then
    kThroughput,  // the fastest plan has items_per_s
    kLoss,        // there is one that loses more
    kLatency,     // there is one of latency_s
    kAside,       // there is one that exceeds the limits of other kinds of microbatches
  };

  // Whether memory is what is missing, so that a smaller request might have a plan.
  bool of_memory() const {
    return kind == Kind::kLayer || kind == Kind::kMemory || kind == Kind::kBuffers || kind == Kind::kCut;
  }

  Kind kind = Kind::kCut;
  int layer = 0;
  double needed_bytes = 0;
  double free_bytes = 0;
  double factor = 0;
  double items_per_s = 0;
  double latency_s = 0;
};

// For a problem that has no plan. Asks the solver about easier problems, for a few seconds at most.
WhyNone why_no_plan(const Problem& problem, const Options& options);

struct WhyUnused {
  enum class Kind {
    kMemory,  // free_bytes hold no layer; the smallest needs needed_bytes
    kNoBandwidth,
    kSlow,       // its fastest layer takes `seconds`, at least the period
    kSlowLink,   // its link takes `seconds` for the smallest cut, at least the period
    kNotNeeded,  // proven
    kUndecided,  // no better plan with it was found in time
  };

  Kind kind = Kind::kUndecided;
  double needed_bytes = 0;
  double free_bytes = 0;
  double seconds = 0;
};

// Why the best plan does not use a host. The specific reasons are exact: they hold for every stage that it could run.
WhyUnused why_unused(const Problem& problem, int host, Objective objective, const Solution& solution);

}  // namespace pipeedge
