// A joint problem as JSON, as --plan auto --problem reads and --plan auto --format problem prints it.
//
//   {"settings": [{a problem; its types optionally with "loss": [of each layer]}, ...],
//    "widths": [{"bits": 0}, {"bits": 8, "loss": [at each cut between two layers, null: not allowed]}, ...],
//    "max_loss": 0.01, "max_latency_s": null, "warnings": [...]}
#pragma once

#include <string>
#include <vector>

#include "../core/joint.hpp"
#include "../yaml/assembly.hpp"

namespace pipeedge::cli {

struct NamedJoint {
  std::string model;                   // name for reports
  JointProblem problem;
  // By setting: notes of its types.
  std::vector<std::vector<yaml::TypeNotes>> notes;
  std::vector<yaml::LeftOut> left_out;  // hosts that cannot be used in any setting
  std::vector<std::string> warnings;
  bool losses_known = true;            // false if losses only rank plans, because agreement does not matter
};

// `name` is the name of the text in messages. Throws yaml::SpecError.
NamedJoint read_joint(const std::string& text, const std::string& name);

std::string joint_json(const NamedJoint& joint);

}  // namespace pipeedge::cli
