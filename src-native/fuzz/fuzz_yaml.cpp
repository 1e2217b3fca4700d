// Fuzz target for the YAML adapter: for any bytes, it either returns data that the core accepts, or throws
// SpecError with one line. Anything else (another exception, a crash, a hang) is a bug. The same holds for problems
// as JSON, which are read as the same kind of tree.
//
// The input is one document, which is read as each of the four files in turn; or four documents separated
// by zero bytes, which no file may contain: models, device types, devices, neighbours. These are also
// assembled into a problem, with and without a choice of microbatch sizes and number types.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "../cli/files_json.hpp"
#include "../cli/problem_json.hpp"
#include "../core/problem.hpp"
#include "../yaml/assembly.hpp"

namespace {

using namespace pipeedge;

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "fault: %s\n", what);
  std::abort();
}

// The result of `read`, or nothing if it failed with a one-line message.
template <typename Read>
auto attempt(const Read& read) -> std::optional<decltype(read())> {
  try {
    return read();
  } catch (const yaml::SpecError& error) {
    const std::string_view message = error.what();
    require(!message.empty(), "an empty message");
    require(message.find_first_of("\r\n") == std::string_view::npos, "a message of several lines");
    return std::nullopt;
  }
}

void check_problem(const std::vector<std::string>& texts) {
  const auto models = attempt([&] { return yaml::models_from(yaml::parse(texts[0], "models.yml")); });
  const auto types = attempt([&] { return yaml::device_types_from(yaml::parse(texts[1], "device_types.yml")); });
  const auto devices = attempt([&] { return yaml::devices_from(yaml::parse(texts[2], "devices.yml")); });
  const auto neighbors = attempt([&] { return yaml::neighbors_from(yaml::parse(texts[3], "neighbors.yml")); });
  cli::files_json({models, types, devices, neighbors});
  if (const auto problem = attempt([&] { return cli::read_problem(texts[0], "problem.json"); })) {
    validate(problem->problem);
    cli::problem_json(*problem);
  }
  if (!models || !types || !devices) return;
  for (const yaml::ModelSpec& model : models->entries) {
    yaml::Request request;
    request.model = model.name;
    for (const bool joint : {false, true}) {
      if (joint) request.choice.emplace();
      const auto assembly = attempt(
          [&] { return yaml::assemble(*models, *types, *devices, neighbors ? &*neighbors : nullptr, request); });
      if (assembly) validate(assembly->problem);
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::vector<std::string> texts(1);
  for (std::size_t i = 0; i < size; ++i) {
    if (data[i] == 0 && texts.size() < 4) {
      texts.emplace_back();
    } else {
      texts.back() += static_cast<char>(data[i]);
    }
  }
  if (texts.size() == 1) texts.assign(4, texts.front());
  texts.resize(4);
  check_problem(texts);
  return 0;
}
