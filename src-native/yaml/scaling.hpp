// Profiles and models of text for sentences of another length than the one they were measured with.
#pragma once

#include <string>
#include <vector>

#include "specs.hpp"

namespace pipeedge::yaml {

// Sentences of one length, as a part of all.
struct Length {
  double tokens = 0;
  double part = 0;
};

// Lengths of microbatches of sentences that come in no order: of each, that of its longest sentence.
std::vector<Length> microbatch_lengths(std::vector<Length> sentences, double batch_size);

double mean_tokens(const std::vector<Length>& lengths);

// The lengths at which `profile` was measured, shortest first.
std::vector<double> lengths_of(const Profile& profile);

// Returns `profile` scaled to microbatches of these lengths: their average times, and the activations of `longest`.
Profile profile_at(const Profile& profile, const std::vector<Length>& lengths, double longest);

// Returns the model's sizes for sentences of `tokens`, at least the part that does not grow.
Model model_at(const ModelSpec& spec, double tokens);

// Explains why a profile cannot be scaled to sentences of `tokens`; empty if it can.
std::string why_unscaled(const Profile& profile, double tokens);

}  // namespace pipeedge::yaml
