// The contents of the scheduler's files as JSON, as --format=files prints them. docs/scheduler.md describes the keys.
#pragma once

#include <optional>
#include <string>

#include "../yaml/specs.hpp"

namespace pipeedge::cli {

struct SpecFiles {
  std::optional<yaml::Models> models;
  std::optional<yaml::DeviceTypes> types;
  std::optional<yaml::Devices> devices;
  std::optional<yaml::Neighbors> neighbors;
};

std::string files_json(const SpecFiles& files);

}  // namespace pipeedge::cli
