// The joint problem that the scheduler's files describe together, for one request.
#pragma once

#include <string>
#include <vector>

#include "../yaml/assembly.hpp"
#include "joint_json.hpp"

namespace pipeedge::cli {

struct JointRequest {
  std::vector<double> batch_sizes;     // to choose from; empty: all profiled
  std::vector<std::string> dtypes;     // with or without "torch."; empty: all profiled
  std::vector<int> widths{0, 16, 8, 6, 4};
  double min_agreement = 0.99;         // 0: whatever was not measured is allowed, too
  double max_latency_s = kInfinity;
};

// `base`: all but microbatch size and number type. Throws yaml::SpecError if the files do not contain what the
// requests need. Profiles that are missing, and agreement that was not measured, are named in warnings.
NamedJoint joint_of_files(const yaml::Models& models, const yaml::DeviceTypes& types, const yaml::Devices& devices,
                          const yaml::Neighbors* neighbors, const yaml::Request& base, const JointRequest& joint);

}  // namespace pipeedge::cli
