#include "feasibility.hpp"

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "search.hpp"

namespace pipeedge {
namespace {

constexpr int kSpreadRounds = 60;

std::size_t at(int i) { return static_cast<std::size_t>(i); }

void accept(Path path, Verdict& verdict) {
  verdict.answer = Answer::kYes;
  verdict.path = std::move(path);
}

}  // namespace

void PriceMemory::remember(const Network& network, const Prices& prices) {
  of_class_.assign(at(network.instance().classes()), 0);
  for (int cut = 0; cut < network.layers(); ++cut) {
    for (const Arc* arc = network.begin(cut); arc != network.end(cut); ++arc) {
      of_class_[at(arc->cls)] = prices.of[at(arc->resource)];
    }
  }
}

Prices PriceMemory::prices_for(const Network& network) const {
  Prices prices;
  for (int r = 0; r < network.resources(); ++r) {
    const double price = of_class_[at(network.first_class(r))];
    prices.of.push_back(price);
    prices.budget += price * std::min(network.capacity(r), network.layers());
  }
  price_paths(network, prices, nullptr);
  return prices;
}

Verdict Feasibility::ask(double bottleneck, int stages, const Effort& effort) {
  const Network network(instance_, bottleneck, Purpose::kFeasibility);
  return ask(network, stages, effort);
}

Verdict Feasibility::ask(const Network& network, int stages, const Effort& effort) {
  Verdict verdict;
  verdict.next_bottleneck = network.next_bottleneck();
  PricingTask task;
  task.max_stages = stages;
  task.precision = effort.precision;
  task.guess = memory_.guess();
  Pricer pricer(network, task, clock_);
  // Between rounds of pricing, a narrow search: easy questions need no good prices. Once the prices
  // are as good as they get, wide ones, ordered by prices of several kinds.
  bool more = true;
  for (int rounds = 10, spent = 0; more; rounds *= 2) {
    more = pricer.advance(rounds) && spent < max_rounds(network);
    spent += rounds;
    if (pricer.excluded()) verdict.answer = Answer::kNo;
    if (pricer.found()) accept(*pricer.found(), verdict);
    if (verdict.answer == Answer::kOpen) explore(network, pricer.best(), stages, more, effort, verdict);
    if (verdict.answer != Answer::kOpen) break;
  }
  if (std::isfinite(pricer.bound())) memory_.remember(network, pricer.best());
  return verdict;
}

void Feasibility::explore(const Network& network, const Prices& bounding, int stages, bool narrow,
                          const Effort& effort, Verdict& verdict) const {
  SearchTask task;
  task.max_stages = stages;
  task.width = narrow ? kNarrow : effort.width;
  task.max_work = effort.work;
  std::vector<Prices> prices{bounding};
  for (const double sharpness : {0.0, 6.0, 12.0, 24.0, 48.0}) {
    if (sharpness > 0) {
      std::optional<Path> matched;
      prices = {spread_prices(network, sharpness, kSpreadRounds, stages, &matched), bounding};
      if (matched) {
        accept(std::move(*matched), verdict);
        return;
      }
    }
    SearchResult result = search(network, prices, task, clock_);
    if (result.found) {
      accept(std::move(*result.found), verdict);
    } else if (result.complete) {
      verdict.answer = Answer::kNo;
    }
    if (verdict.answer != Answer::kOpen || narrow || clock_.expired()) return;
  }
}

}  // namespace pipeedge
