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

double fraction(const std::string& option, const std::string& text) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  const bool plain = text.find_first_not_of("0123456789.eE+-") == std::string::npos;
  if (text.empty() || !plain || *end != '\0' || !(value >= 0) || value > 1) {
    throw UsageError(option + ": '" + yaml::printable(text) + "' is not a number from 0 to 1");
  }
  return value;
}

}  // namespace

Group joint_group() {
  return {
      "Plan",
      {
          {{"--plan"},
           "WHICH",
           "cut: only where the model is cut, and the hosts; auto:\n"
           "also the microbatch size, the number type of each\n"
           "stage and the bits of each link [cut]",
           [](CommandLine& c, const std::string& n, const std::string& v) {
             if (v != "cut" && v != "auto") {
               throw UsageError(n + ": '" + yaml::printable(v) + "' is neither cut nor auto");
             }
             c.joint = v == "auto";
           }},
          {{"--batch-sizes"},
           "N,...",
           "microbatch sizes to choose from [all profiled]",
           [](CommandLine& c, const std::string& n, const std::string& v) {
             c.choice.batch_sizes.clear();
             for (const std::string& name : names(n, v)) {
               c.choice.batch_sizes.push_back(whole_number(n, name, 1, 1e9));
             }
           }},
          {{"--dtypes"},
           "TYPE,...",
           "number types to choose from [all profiled]",
           [](CommandLine& c, const std::string& n, const std::string& v) { c.choice.dtypes = names(n, v); }},
          {{"--widths"},
           "BITS,...",
           "bits per value to choose from on links between stages:\n"
           "2 to 8, 16, or 0 for uncompressed [0,16,8,6,4]",
           [](CommandLine& c, const std::string& n, const std::string& v) {
             c.choice.widths.clear();
             for (const std::string& name : names(n, v)) {
               const int bits = link_bits(n, name);
               auto& widths = c.choice.widths;
               if (std::find(widths.begin(), widths.end(), bits) == widths.end()) widths.push_back(bits);
             }
           }},
          {{"--min-agreement"},
           "PART",
           "part of the items, from 0 to 1, that have to be\n"
           "classified as in float32 with uncompressed links; the\n"
           "losses of stages and links are added up; 0 allows what\n"
           "was not measured, too [0.99]",
           [](CommandLine& c, const std::string& n, const std::string& v) { c.choice.min_agreement = fraction(n, v); }},
          {{"--max-latency"},
           "SECONDS",
           "longest time of a microbatch through the idle pipeline\n"
           "or, for a decoder, of a token of a lone text [any]",
           [](CommandLine& c, const std::string& n, const std::string& v) {
             c.choice.max_latency_s = c.request.texts.max_token_s = positive_number(n, v);
           }},
          {{"--min-throughput"},
           "RATE",
           "with --objective energy: least number of items per\n"
           "second; with --objective latency for a decoder: of\n"
           "tokens of all texts [any]",
           [](CommandLine& c, const std::string& n, const std::string& v) {
             c.solver.min_items_per_s = c.request.texts.min_tokens_per_s = positive_number(n, v);
           }},
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
