// What the steps of a decoder cost, from its profiles.
#pragma once

#include "../core/problem.hpp"
#include "specs.hpp"

namespace pipeedge::yaml {

// The texts that a decoder is planned for.
struct Texts {
  double streams = 1;                    // that grow at a time
  double context = 0;                    // longest text in tokens, which memory is for; 0: the model's
  double prompt = 0;                     // tokens of a prompt; 0: a quarter of the context
  double answer = 0;                     // tokens of an answer; 0: the rest of the context
  double groups = 0;                     // in which they step; 0: as many as are best
  bool alone = false;                    // whether the plan is for the token of a lone stream
  double max_token_s = kInfinity;        // longest time of a token of a lone stream
  double max_first_token_s = kInfinity;  // ... and of its first one
  double min_tokens_per_s = 0;           // of all streams

  bool given() const {
    return streams != 1 || context > 0 || prompt > 0 || answer > 0 || groups > 0 || max_first_token_s < kInfinity;
  }
  // With what is not given filled in.
  Texts complete(double longest) const;
  // Numbers of groups to choose from, on so many hosts.
  std::vector<double> group_counts(double hosts) const;
  // Tokens in front of a token of an answer, on average.
  double positions() const { return prompt + answer / 2; }
};

// Rows of a step. A chunk of a prompt is of one stream, other rows are of a stream each.
struct StepRows {
  double rows = 1;
  double positions = 0;  // in front of a row, on average
  bool chunk = false;
};

// Tokens of a prompt that a step computes, if so many stages take turns: as many as end soonest if stages are equal.
double chunk_rows(const StepCosts& steps, double prompt, int stages);

// Rows of the largest step: a chunk, and a row of each stream.
double most_rows(const Texts& texts);

// Bytes that each layer keeps of all streams: whole pages.
std::vector<double> state_bytes(const StepCosts& steps, const ModelSpec& model, const Texts& texts);

// Sets what a step costs on a device type: its layers, and the ends, in which as many rows decide a token as there are
// streams in the step.
void set_step_costs(const StepCosts& steps, const ModelSpec& model, const StepRows& rows, DeviceType& type);

// Seconds of the head for the only row of a prompt that decides a token.
double first_head_s(const StepCosts& steps);

}  // namespace pipeedge::yaml
