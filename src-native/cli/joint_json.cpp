#include "joint_json.hpp"

#include <stdexcept>
#include <utility>

#include "../yaml/tree.hpp"
#include "problem_json.hpp"
#include "text.hpp"

namespace pipeedge::cli {
namespace {

using yaml::View;

Width width_from(const View& view, int layers) {
  Width width;
  width.bits = static_cast<int>(view.at("bits").whole_number());
  const auto losses = view.find("loss");
  if (!losses || losses->is_null()) return width;
  const std::vector<View> items = losses->items();
  if (static_cast<int>(items.size()) != layers - 1) {
    losses->fail("has " + std::to_string(items.size()) + " values for " + std::to_string(layers - 1) +
                 " cuts between two layers");
  }
  width.loss.push_back(0);             // nothing is compressed where the model begins and ends
  for (const View& item : items) width.loss.push_back(item.is_null() ? kInfinity : item.number());
  width.loss.push_back(0);
  return width;
}

void write_width(JsonWriter& json, const Width& width) {
  json.open('{').key("bits").value(width.bits);
  if (!width.loss.empty()) json.key("loss").numbers({width.loss.begin() + 1, width.loss.end() - 1});
  json.close('}');
}

}  // namespace

NamedJoint read_joint(const std::string& text, const std::string& name) {
  const yaml::Document document = yaml::parse(text, name, kLargestInProblem);
  const View root(document);
  NamedJoint joint;
  const View settings = root.at("settings");
  for (const View& entry : settings.items()) {
    NamedProblem named = problem_from(entry);
    Setting setting;
    setting.problem = std::move(named.assembly.problem);
    setting.dtype = named.dtype;
    for (const yaml::TypeNotes& notes : named.assembly.notes) setting.loss.push_back(notes.loss);
    joint.problem.settings.push_back(std::move(setting));
    joint.notes.push_back(std::move(named.assembly.notes));
    joint.model = named.model;
  }
  if (joint.problem.settings.empty()) settings.fail("lists no microbatch size and number type");
  for (const View& entry : root.at("widths").items()) {
    joint.problem.widths.push_back(width_from(entry, joint.problem.layers()));
  }
  if (const auto links = root.find("links")) {
    for (const View& entry : links->items()) {
      joint.problem.links.push_back({entry.at("from").text(), entry.at("to").text(),
                                     entry.at("bw_bytes_per_s").number(), number_or(entry, "latency_s", 0)});
    }
  }
  joint.problem.max_loss = number_or(root, "max_loss", kInfinity);
  joint.problem.max_latency_s = number_or(root, "max_latency_s", kInfinity);
  joint.losses_known = joint.problem.max_loss < kInfinity;
  if (const auto warnings = root.find("warnings")) {
    for (const View& entry : warnings->items()) joint.warnings.push_back(entry.text());
  }
  try {
    validate(joint.problem);
  } catch (const std::invalid_argument& error) {
    root.fail(error.what());
  }
  return joint;
}

std::string joint_json(const NamedJoint& joint) {
  JsonWriter json;
  json.open('{');
  json.key("settings").open('[');
  for (std::size_t s = 0; s < joint.problem.settings.size(); ++s) {
    const Setting& setting = joint.problem.settings[s];
    NamedProblem named;
    named.assembly.problem = setting.problem;
    named.assembly.notes = joint.notes[s];
    named.model = joint.model;
    named.dtype = setting.dtype;
    write_problem(json, named);
  }
  json.close(']');
  json.key("widths").open('[');
  for (const Width& width : joint.problem.widths) write_width(json, width);
  json.close(']');
  json.key("links").open('[');
  for (const NamedLink& link : joint.problem.links) {
    json.open('{').key("from").value(link.from).key("to").value(link.to);
    json.key("bw_bytes_per_s").value(link.bw_bytes_per_s).key("latency_s").value(link.latency_s).close('}');
  }
  json.close(']');
  json.key("max_loss").value(joint.problem.max_loss);
  json.key("max_latency_s").value(joint.problem.max_latency_s);
  json.key("warnings").open('[');
  for (const std::string& warning : joint.warnings) json.value(warning);
  json.close(']');
  json.close('}');
  return json.text();
}

}  // namespace pipeedge::cli
