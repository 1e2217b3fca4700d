#include "joint_feasibility.hpp"

#include <cmath>
#include <utility>

#include "joint_search.hpp"

namespace pipeedge {
namespace {

constexpr int kPricingRounds = 300;

void accept(const JointNetwork& network, const JointPath& path, JointVerdict& verdict) {
  verdict.answer = Answer::kYes;
  verdict.stages = stages_of(network, path);
}

}  // namespace

JointVerdict JointFeasibility::ask(const JointLimits& limits, const Score& score, std::optional<Amount> least,
                                   const Effort& effort) {
  const JointNetwork network(instance_, limits, score);
  JointVerdict verdict;
  verdict.next_period = network.next_period();
  JointPricer pricer(network, guess_ ? &*guess_ : nullptr, clock_);
  bool more = true;
  for (int rounds = 10, spent = 0; more; rounds *= 2) {
    more = pricer.advance(rounds, effort.precision) && spent < kPricingRounds;
    spent += rounds;
    if (pricer.excluded()) verdict.answer = Answer::kNo;
    if (pricer.found()) accept(network, *pricer.found(), verdict);
    if (verdict.answer == Answer::kOpen || (least && verdict.answer == Answer::kYes)) {
      explore(network, pricer, least, more, effort, verdict);
    }
    if (verdict.answer != Answer::kOpen || clock_.expired()) break;
  }
  if (!pricer.best().of_class.empty()) guess_ = pricer.best();
  return verdict;
}

double JointFeasibility::next_period(double period_s) const {
  JointLimits limits;
  limits.period_s = period_s;
  return JointNetwork(instance_, limits).next_period();
}

void JointFeasibility::explore(const JointNetwork& network, JointPricer& pricer, std::optional<Amount> least,
                               bool narrow, const Effort& effort, JointVerdict& verdict) const {
  JointSearchTask task{narrow ? kNarrow : effort.width, effort.work, least};
  std::vector<JointPrices> bounding{pricer.best()};
  for (const Amount amount : {kLoss, kSeconds, kScore}) {
    if (!std::isinf(network.limits().most[amount])) bounding.push_back(amount_prices(network, amount));
  }
  for (const double sharpness : {0.0, 6.0, 24.0}) {
    std::vector<JointPrices> prices = bounding;
    if (sharpness > 0) {
      prices.insert(prices.begin(), pricer.spread(sharpness, 40));
      if (pricer.found() && !least) return accept(network, *pricer.found(), verdict);
    }
    const JointSearchResult result = search(network, prices, task, clock_);
    if (result.found) return accept(network, *result.found, verdict);
    // With `least`, a plan may be known already: there is no better one then.
    if (result.complete && verdict.answer == Answer::kOpen) verdict.answer = Answer::kNo;
    if (verdict.answer != Answer::kOpen || narrow || clock_.expired()) return;
  }
}

}  // namespace pipeedge
