// Answers in words, as YAML and as JSON. Pure: nothing is found out here.
#pragma once

#include <cstddef>
#include <string>

#include "answer.hpp"

namespace pipeedge::cli {

std::string schedule_yaml(const Answer& answer);
// The same for a sentence: "mb-0: [1, 24], rcc-0: [25, 48]".
std::string in_one_line(const std::string& schedule);
// The stages with their costs, the bottleneck, the bound, and the hosts that are not used. The table leaves columns out
// if it would be wider than `room` characters, unless that is 0.
std::string explanation(const Answer& answer, std::size_t room = 0);
// How many items a second a plan has: "5.165 items/s".
std::string throughput_text(const Answer& answer);
// One line for each kind of loss.
std::string losses_text(const Answer& answer);
std::string what_if_line(const Answer& answer, const WhatIf& what_if);
std::string report_json(const Answer& answer);
// Several plans that were given.
std::string reports_json(const std::vector<Answer>& answers);

// "stopped after 10.002 s: gap 0.05 %, ...", if the plan is not proven to be the best.
std::string stopped_line(const Answer& answer);
// Why there is no plan, or the one that was found is refused.
std::string refusal(const Answer& answer);
// For programs, if there is no plan: whether that is proven.
std::string no_schedule_json(const Answer& answer);

}  // namespace pipeedge::cli
