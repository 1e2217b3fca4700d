#include "feasibility.hpp"

#include <cmath>
#include <utility>
#include <vector>

#include "search.hpp"

namespace pipeedge {
namespace {

constexpr int kSpreadRounds = 60;

void accept(Path path, Verdict& verdict) {
  verdict.answer = Answer::kYes;
  verdict.path = std::move(path);
}

}  // namespace

Verdict Feasibility::ask(const Limits& limits, const Effort& effort, std::optional<Amount> least) {
  return ask(Network(instance_, limits, least), instance_.max_stages(), effort, least);
}

Verdict Feasibility::ask(const Network& network, int max_stages, const Effort& effort, std::optional<Amount> least) {
  Verdict verdict;
  verdict.next_period = network.next_period();
  PricingTask task;
  task.max_stages = max_stages;
  task.precision = effort.precision;
  task.guess = &memory_;
  Pricer pricer(network, task, clock_);
  // Between rounds of pricing, a narrow search: easy questions need no good prices. Once the prices
  // are as good as they get, wide ones, ordered by prices of several kinds.
  bool more = true;
  for (int rounds = 10, spent = 0; more; rounds *= 2) {
    more = pricer.advance(rounds) && spent < max_rounds(network);
    spent += rounds;
    if (pricer.excluded()) verdict.answer = Answer::kNo;
    if (pricer.found()) accept(*pricer.found(), verdict);
    if (verdict.answer == Answer::kOpen || (least && verdict.answer == Answer::kYes)) {
      explore(network, pricer, max_stages, least, more, effort, verdict);
    }
    if (verdict.answer != Answer::kOpen || clock_.expired()) break;
  }
  if (std::isfinite(pricer.bound())) memory_.remember(network, pricer.best());
  return verdict;
}

void Feasibility::explore(const Network& network, Pricer& pricer, int max_stages, std::optional<Amount> least,
                          bool narrow, const Effort& effort, Verdict& verdict) const {
  SearchTask task;
  task.max_stages = max_stages;
  task.width = narrow ? kNarrow : effort.width;
  task.max_work = effort.work;
  task.least = least;
  std::vector<Prices> bounding{pricer.best()};
  for (int k = 0; k < network.active(); ++k) {
    const Amount amount = network.amount(k);
    if (least == amount || std::isfinite(network.limits().most[amount])) {
      bounding.push_back(amount_prices(network, amount));
    }
  }
  for (const double sharpness : {0.0, 6.0, 12.0, 24.0, 48.0}) {
    std::vector<Prices> prices = bounding;
    if (sharpness > 0) {
      prices.insert(prices.begin(), pricer.spread(sharpness, kSpreadRounds));
      if (pricer.found() && !least) return accept(*pricer.found(), verdict);
    }
    SearchResult result = search(network, prices, task, clock_);
    if (result.found) return accept(std::move(*result.found), verdict);
    // With `least`, a plan may be known already: there is no better one then.
    if (result.complete && verdict.answer == Answer::kOpen) verdict.answer = Answer::kNo;
    if (verdict.answer != Answer::kOpen || narrow || clock_.expired()) return;
  }
}

Least find_least(const Network& network, Amount amount, const KnownPlan& known, double most, int max_stages,
                 const Effort& effort, const Clock& clock, int max_rounds) {
  Least found;
  PricingTask pricing;
  pricing.max_stages = max_stages;
  pricing.least = amount;
  pricing.cutoff = most;
  pricing.precision = effort.precision;
  pricing.known = &known;
  Pricer pricer(network, pricing, clock);
  pricer.advance(max_rounds);
  found.bound = pricer.bound();
  found.prices = pricer.best();
  found.exact = pricer.excluded();
  // Narrow first: each plan found brings the limit down for the wider search after it.
  SearchTask task;
  task.max_stages = max_stages;
  task.max_work = effort.work;
  task.least = amount;
  task.most = most;
  const auto keep = [&](const std::optional<Path>& path, double reached) {
    if (!path || reached > task.most) return;
    found.better = path;
    task.most = just_below(reached);
  };
  keep(pricer.found(), pricer.found_least());
  int part = 1;
  while (effort.width / (5 * part) >= kNarrow) part *= 5;
  for (; part > 0 && !found.exact && !clock.expired(); part /= 5) {
    task.width = effort.width / part;
    const SearchResult result = search(network, {found.prices}, task, clock);
    keep(result.found, result.least);
    found.exact = result.complete;
  }
  return found;
}

}  // namespace pipeedge
