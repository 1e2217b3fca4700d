// Profiles and models of text for sentences of another length than the one they were measured with.
#pragma once

#include <string>
#include <vector>

#include "specs.hpp"

namespace pipeedge::yaml {

// The lengths at which `profile` was measured, shortest first.
std::vector<double> lengths_of(const Profile& profile);

// Returns `profile` scaled to sentences of `tokens`.
Profile profile_at(const Profile& profile, double tokens);

// Returns the model's sizes for sentences of `tokens`, at least the part that does not grow.
Model model_at(const ModelSpec& spec, double tokens);

// Explains why a profile cannot be scaled to sentences of `tokens`; empty if it can.
std::string why_unscaled(const Profile& profile, double tokens);

}  // namespace pipeedge::yaml
