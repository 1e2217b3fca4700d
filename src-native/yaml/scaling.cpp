#include "scaling.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "../core/lengths.hpp"
#include "wording.hpp"

namespace pipeedge::yaml {

std::vector<double> lengths_of(const Profile& profile) {
  std::vector<double> lengths;
  if (profile.tokens > 0) lengths.push_back(profile.tokens);
  for (const Profile& other : profile.lengths) lengths.push_back(other.tokens);
  std::sort(lengths.begin(), lengths.end());
  return lengths;
}

namespace {

// Returns a list of `profile` scaled to sentences of `tokens`; unscaled if a length lacks it.
std::vector<double> list_at(const Profile& profile, std::vector<double> Profile::*list, double tokens) {
  std::vector<const Profile*> measured{&profile};
  for (const Profile& other : profile.lengths) {
    if ((other.*list).size() != (profile.*list).size()) return profile.*list;
    measured.push_back(&other);
  }
  std::sort(measured.begin(), measured.end(), [](const Profile* a, const Profile* b) { return a->tokens < b->tokens; });
  const std::vector<double> lengths = lengths_of(profile);
  std::vector<double> found;
  for (std::size_t layer = 0; layer < (profile.*list).size(); ++layer) {
    std::vector<double> values;
    for (const Profile* each : measured) values.push_back((each->*list)[layer]);
    // The cost of a link depends only on the bytes.
    const bool of_link = list == &Profile::receive_s || list == &Profile::send_s;
    const Growth growth = of_link ? Growth::kLinear : growth_of(static_cast<int>(layer));
    found.push_back(at_length(lengths, values, tokens, growth));
  }
  return found;
}

std::vector<double> mean_list(const Profile& profile, std::vector<double> Profile::*list,
                              const std::vector<Length>& lengths) {
  std::vector<double> mean((profile.*list).size(), 0);
  for (const Length& length : lengths) {
    const std::vector<double> values = list_at(profile, list, length.tokens);
    for (std::size_t layer = 0; layer < mean.size(); ++layer) mean[layer] += length.part * values[layer];
  }
  return mean;
}

}  // namespace

std::vector<Length> microbatch_lengths(std::vector<Length> sentences, double batch_size) {
  std::sort(sentences.begin(), sentences.end(), [](const Length& a, const Length& b) { return a.tokens < b.tokens; });
  double all = 0;
  for (const Length& length : sentences) all += length.part;
  std::vector<Length> found;
  double part = 0;     // of sentences up to this length
  double shorter = 0;  // of microbatches that are shorter
  for (const Length& length : sentences) {
    part += length.part / all;
    const double up_to = std::pow(std::min(part, 1.0), batch_size);
    found.push_back({length.tokens, up_to - shorter});
    shorter = up_to;
  }
  found.back().part += 1 - shorter;  // rounding
  return found;
}

double mean_tokens(const std::vector<Length>& lengths) {
  double mean = 0;
  for (const Length& length : lengths) mean += length.part * length.tokens;
  return mean;
}

Profile profile_at(const Profile& profile, const std::vector<Length>& lengths, double longest) {
  Profile found = profile;
  for (const auto list : {&Profile::time_s, &Profile::receive_s, &Profile::send_s}) {
    found.*list = mean_list(profile, list, lengths);
  }
  found.activation_bytes = list_at(profile, &Profile::activation_bytes, longest);
  found.tokens = longest;
  found.lengths.clear();
  return found;
}

Model model_at(const ModelSpec& spec, double tokens) {
  Model model = spec.model;
  const double more = tokens - spec.tokens;
  model.elements_in = std::max(0.0, model.elements_in + more * spec.elements_in_per_token);
  for (std::size_t i = 0; i < model.elements_out.size(); ++i) {
    model.elements_out[i] = std::max(0.0, model.elements_out[i] + more * spec.elements_out_per_token[i]);
  }
  return model;
}

std::string why_unscaled(const Profile& profile, double tokens) {
  const std::vector<double> lengths = lengths_of(profile);
  if (lengths.size() > 1 || (lengths.size() == 1 && lengths.front() == tokens)) return "";
  const std::string wanted = number_text(tokens);
  if (lengths.empty()) {
    return "does not say with how many tokens it was profiled; its times are not scaled to " + wanted +
           ": profile it again";
  }
  const std::string known = number_text(lengths.front());
  const std::string both = tokens < lengths.front() ? wanted + "," + known : known + "," + wanted;
  return "was profiled with " + known + " tokens only; its times are not scaled to " + wanted +
         ": profile it with --tokens " + both;
}

}  // namespace pipeedge::yaml
