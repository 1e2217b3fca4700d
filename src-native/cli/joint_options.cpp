#include <algorithm>
#include <cstdlib>
#include <set>

#include "../yaml/wording.hpp"
#include "option_table.hpp"

namespace pipeedge::cli {
namespace {

// What the plan chooses by itself, with the option that limits the choice.
const std::set<std::string> kChosen{"--batch-size", "--dtype", "--dtype-of", "--link-bits"};
const std::set<std::string> kOnlyJoint{"--batch-sizes", "--dtypes", "--widths", "--min-agreement"};

std::vector<int> widths_of(const std::string& name, const std::string& value) {
  std::vector<int> widths;
  for (const int bits : list_of(link_bits)(name, value)) {
    if (std::find(widths.begin(), widths.end(), bits) == widths.end()) widths.push_back(bits);
  }
  return widths;
}

}  // namespace

Group joint_group() {
  using C = CommandLine;
  using J = yaml::Choice;
  using R = yaml::Request;
  using T = yaml::Texts;
  return {
      "Plan",
      {
          option({"--plan"}, "WHICH",
                 "cut: only where the model is cut, and the hosts; auto: also the microbatch size, the number type of "
                 "each stage and the bits of each link [cut]",
                 into(&C::joint, one_of<bool>({{"cut", false}, {"auto", true}}))),
          option({"--batch-sizes"}, "N,...", "microbatch sizes to choose from [all profiled]",
                 into(&C::choice, &J::batch_sizes, list_of(whole(1, 1e9)))),
          option({"--dtypes"}, "TYPE,...", "number types to choose from [all profiled]",
                 into(&C::choice, &J::dtypes, list_of(nonempty))),
          option(
              {"--widths"}, "BITS,...",
              "bits per value to choose from on links between stages: 2 to 8, 16, or 0 for uncompressed [0,16,8,6,4]",
              into(&C::choice, &J::widths, widths_of)),
          option({"--min-agreement"}, "PART",
                 "part of the items, from 0 to 1, that have to be classified as in float32 with uncompressed links; "
                 "the losses of stages and links are added up; 0 allows what was not measured, too [0.99]",
                 into(&C::choice, &J::min_agreement, fraction)),
          option({"--max-latency"}, "SECONDS",
                 "longest time of a microbatch through the idle pipeline or, for a decoder, of a token of a lone text "
                 "[any]",
                 both(into(&C::choice, &J::max_latency_s, positive_number),
                      into(&C::request, &R::texts, &T::max_token_s, positive_number))),
          option({"--min-throughput"}, "RATE",
                 "with --objective energy: least number of items per second; with --objective latency for a decoder: "
                 "of tokens of all texts [any]",
                 both(into(&C::solver, &Options::min_items_per_s, positive_number),
                      into(&C::request, &R::texts, &T::min_tokens_per_s, positive_number))),
      }};
}

void check_joint(const CommandLine& line, const std::vector<std::string>& given) {
  for (const std::string& name : given) {
    if (!line.joint && kOnlyJoint.count(name) != 0) {
      throw UsageError(name + " needs --plan auto, which chooses what it limits");
    }
    if (name == "--min-throughput" && line.solver.objective == Objective::kThroughput) {
      throw UsageError(name + " needs --objective energy, which would otherwise choose a slower plan");
    }
    if (!line.joint) continue;
    if (kChosen.count(name) != 0) {
      throw UsageError(name +
                       " and --plan auto: the plan chooses it; --batch-sizes, --dtypes and --widths limit the "
                       "choice");
    }
  }
}

}  // namespace pipeedge::cli
