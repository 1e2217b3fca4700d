#include "problem_json.hpp"

#include <algorithm>
#include <functional>
#include <set>
#include <stdexcept>
#include <unordered_map>
#include <utility>

#include "../core/links.hpp"
#include "../core/takeover.hpp"
#include "../yaml/wording.hpp"
#include "options.hpp"

namespace pipeedge::cli {
namespace {

using yaml::View;

constexpr double kLargestInProblem = 1e21;  // the largest number of MB in a YAML file, in bytes

std::string name_of(const std::string& file) { return file == "-" ? "standard input" : file; }

std::string text_of(const std::string& file, Console& console) {
  return file == "-" ? console.input() : yaml::read_text(file);
}

std::string text_or(const View& view, const char* key, const std::string& otherwise) {
  const auto found = view.find(key);
  return found && !found->is_null() ? found->text() : otherwise;
}

double number_or(const View& view, const char* key, double otherwise) {
  const auto found = view.find(key);
  return found && !found->is_null() ? found->number() : otherwise;
}

std::vector<View> items_of(const View& view, const char* key) {
  const auto found = view.find(key);
  return found ? found->items() : std::vector<View>{};
}

[[noreturn]] void wrong_count(const View& view, std::size_t count, std::size_t expected, const char* of) {
  view.fail("has " + std::to_string(count) + " values for " + std::to_string(expected) + " " + of);
}

// One value per layer, or none if the key is missing. `null_is`: what null stands for, if it is allowed.
std::vector<double> per_layer(const View& view, const char* key, std::size_t layers, double null_is = -1) {
  const auto found = view.find(key);
  if (!found || found->is_null()) return {};
  std::vector<double> values;
  if (null_is < 0) {
    values = found->numbers();
  } else {
    for (const View& item : found->items()) values.push_back(item.is_null() ? null_is : item.number());
  }
  if (!values.empty() && values.size() != layers) wrong_count(*found, values.size(), layers, "layers");
  return values;
}

// Row i has the bids for stages that begin with layer i + 1, by their last layer; null if not taken.
std::vector<double> bids_from(const View& view, std::size_t layers) {
  const auto found = view.find("stage_s");
  if (!found || found->is_null()) return {};
  std::vector<double> bids((layers + 1) * (layers + 1), kInfinity);
  const std::vector<View> rows = found->items();
  if (rows.size() != layers) {
    found->fail("has " + std::to_string(rows.size()) + " rows for " + std::to_string(layers) + " layers");
  }
  for (std::size_t first = 0; first < layers; ++first) {
    const std::vector<View> row = rows[first].items();
    if (row.size() != layers - first) wrong_count(rows[first], row.size(), layers - first, "stages");
    for (std::size_t i = 0; i < row.size(); ++i) {
      if (!row[i].is_null()) bids[first * (layers + 1) + first + 1 + i] = row[i].number();
    }
  }
  return bids;
}

DeviceType type_from(const View& view, std::size_t layers) {
  DeviceType type;
  type.name = view.at("name").text();
  type.mem_bytes = view.at("mem_bytes").number();
  type.bw_bytes_per_s = view.at("bw_bytes_per_s").number();
  type.weight_bytes = per_layer(view, "weight_bytes", layers);
  type.time_s = per_layer(view, "time_s", layers);
  if (type.time_s.empty()) type.time_s.assign(layers, 0);
  type.overhead_s = number_or(view, "overhead_s", 0);
  type.receive_s = per_layer(view, "receive_s", layers);
  type.send_s = per_layer(view, "send_s", layers);
  type.activation_bytes = per_layer(view, "activation_bytes", layers);
  type.state_bytes = per_layer(view, "state_bytes", layers);
  type.loss = per_layer(view, "loss", layers, kInfinity);
  type.feed_s = number_or(view, "feed_s", 0);
  type.collect_s = number_or(view, "collect_s", 0);
  type.input_send_s = number_or(view, "input_send_s", 0);
  type.output_receive_s = number_or(view, "output_receive_s", 0);
  type.stage_s = bids_from(view, layers);
  type.busy_w = number_or(view, "busy_w", -1);
  type.idle_w = number_or(view, "idle_w", 0);
  type.load_s_per_byte = number_or(view, "load_s_per_byte", type.load_s_per_byte);
  type.notes.dtype = text_or(view, "dtype", "");
  type.notes.threads = number_or(view, "threads", 0);
  type.notes.kernels = text_or(view, "kernels", "");
  if (const auto tokens = view.find("tokens")) type.notes.tokens = tokens->numbers();
  return type;
}

// Indices by name, in the order in which the names come.
class Names {
 public:
  // Returns false if the name is known already.
  bool add(const std::string& name) { return indices_.emplace(name, static_cast<int>(indices_.size())).second; }
  int find(const View& view) const {
    const auto found = indices_.find(view.text());
    if (found == indices_.end()) view.fail("there is no " + yaml::printable(view.text()) + " in the problem");
    return found->second;
  }

 private:
  std::unordered_map<std::string, int> indices_;
};

class Reader {
 public:
  explicit Reader(const View& root) : root_(root) {}

  NamedProblem read() {
    named_.model = text_or(root_, "model", "model");
    const auto settings = root_.find("settings");
    named_.joint = settings.has_value();
    const std::vector<View> entries = named_.joint ? settings->items() : std::vector<View>{root_};
    if (entries.empty()) settings->fail("lists no microbatch size and number type");
    named_.dtype = named_.joint ? "" : text_or(root_, "dtype", "");
    read_model(entries.front());
    for (const View& entry : entries) add_hosts(entry);
    for (const View& entry : entries) problem_.settings.push_back(setting_from(entry));
    problem_.most_items = number_or(root_, "most_items", kInfinity);
    for (const View& entry : items_of(root_, "asides")) problem_.asides.push_back(aside_from(entry));
    for (const View& entry : items_of(root_, "either")) problem_.either.push_back(aside_from(entry));
    problem_.keeps_caches = number_or(root_, "keeps_caches", 1) != 0;
    for (const View& entry : items_of(root_, "prompts")) problem_.prompts.push_back(aside_from(entry));
    for (const View& entry : items_of(root_, "again")) problem_.again.push_back(aside_from(entry));
    if (const auto texts = root_.find("texts"); texts && !texts->is_null()) {
      named_.texts.emplace();
      named_.texts->streams = texts->at("streams").number();
      named_.texts->context = texts->at("context").number();
      named_.texts->prompt = texts->at("prompt_tokens").number();
      named_.texts->answer = texts->at("answer_tokens").number();
      if (problem_.asides.empty()) texts->fail("needs asides, the first of which is a token of a lone text");
      if (problem_.prompts.empty()) texts->fail("needs prompts, by the number of stages");
    }
    add_links(root_);
    for (std::size_t e = 0; e < entries.size() && named_.joint; ++e) add_links(entries[e]);
    read_data_host(entries);
    if (named_.joint) read_widths();
    problem_.max_loss = number_or(root_, "max_loss", kInfinity);
    problem_.max_latency_s = number_or(root_, "max_latency_s", kInfinity);
    for (const View& entry : items_of(root_, "left_out")) {
      named_.left_out.push_back({entry.at("host").text(), entry.at("type").text(), entry.at("why").text()});
    }
    for (const View& entry : items_of(root_, "warnings")) named_.warnings.push_back(entry.text());
    try {
      validate(problem_);
      if (const auto conditions = root_.find("conditions")) put_under(*conditions, hosts_, named_);
    } catch (const std::invalid_argument& error) {
      root_.fail(error.what());
    }
    return std::move(named_);
  }

  // Throws std::invalid_argument for a number outside its range.
  static void put_under(const View& conditions, const Names& hosts, NamedProblem& named);

 private:
  // What a setting says itself or, for all settings, the whole problem.
  View inherited(const View& setting, const char* key) const {
    const auto own = setting.find(key);
    return own ? *own : root_.at(key);
  }
  std::optional<View> find_inherited(const View& setting, const char* key) const {
    const auto own = setting.find(key);
    return own ? own : root_.find(key);
  }

  void read_model(const View& first) {
    Model& model = problem_.model;
    model.mem_bytes = inherited(first, "weight_bytes").numbers();
    model.elements_in = inherited(first, "elements_in").number();
    model.elements_out = inherited(first, "elements_out").numbers();
    if (const auto shared = find_inherited(first, "shared_with")) {
      for (const double layer : shared->whole_numbers()) {
        model.shared_with.push_back(static_cast<int>(std::min(layer, 1e9)) - 1);
      }
    }
  }

  void add_hosts(const View& entry) {
    Names own;
    const View hosts = inherited(entry, "hosts");
    for (const View& host : hosts.items()) {
      const std::string name = host.at("name").text();
      if (!own.add(name)) host.fail("the name " + yaml::printable(name) + " comes twice");
      if (hosts_.add(name)) problem_.hosts.push_back(name);
    }
    if (problem_.hosts.empty()) hosts.fail("lists no host");
  }

  Aside aside_from(const View& entry) const {
    Aside aside;
    aside.name = entry.at("name").text();
    aside.repeats = number_or(entry, "repeats", 0);
    aside.fixed_s = number_or(entry, "fixed_s", 0);
    aside.max_s = number_or(entry, "max_s", kInfinity);
    aside.longest_limit_s = number_or(entry, "max_longest_s", kInfinity);
    for (const View& one : entry.at("settings").items()) aside.settings.push_back(setting_from(one));
    return aside;
  }

  Setting setting_from(const View& entry) const {
    const std::size_t layers = problem_.model.mem_bytes.size();
    Setting setting;
    setting.dtype = text_or(entry, "dtype", "");
    setting.batch_size = inherited(entry, "batch_size").number();
    setting.element_bytes = inherited(entry, "element_bytes").number();
    setting.input_bytes = number_or(entry, "input_bytes", number_or(root_, "input_bytes", -1));
    setting.output_bytes = number_or(entry, "output_bytes", number_or(root_, "output_bytes", -1));
    if (const auto carried = find_inherited(entry, "carried")) setting.carried = carried->numbers();
    setting.waiting = number_or(entry, "waiting", 1);
    setting.buffers_in = inherited(entry, "buffers_in").number();
    setting.buffers_out = inherited(entry, "buffers_out").number();
    Names types;
    for (const View& one : inherited(entry, "types").items()) {
      setting.types.push_back(type_from(one, layers));
      const std::string& name = setting.types.back().name;
      if (!types.add(name)) one.fail("the name " + yaml::printable(name) + " comes twice");
    }
    check_model(entry, setting);
    setting.type_of.assign(problem_.hosts.size(), Setting::kUnprofiled);
    for (const View& host : inherited(entry, "hosts").items()) {
      setting.type_of[static_cast<std::size_t>(hosts_.find(host.at("name")))] = types.find(host.at("type"));
    }
    return setting;
  }

  // A setting may repeat the sizes of the model; weights of its own are those of its types.
  void check_model(const View& entry, Setting& setting) const {
    const auto same = [&](const char* key, const std::vector<double>& known) {
      const auto own = entry.find(key);
      return !own || own->numbers() == known;
    };
    if (!same("elements_out", problem_.model.elements_out) ||
        number_or(entry, "elements_in", problem_.model.elements_in) != problem_.model.elements_in) {
      root_.fail("the settings have different models: their layers or the elements at their cuts differ");
    }
    if (same("weight_bytes", problem_.model.mem_bytes)) return;
    for (DeviceType& type : setting.types) {
      if (type.weight_bytes.empty()) type.weight_bytes = entry.at("weight_bytes").numbers();
    }
  }

  void add_links(const View& view) {
    for (const View& entry : items_of(view, "links")) {
      problem_.links.push_back({hosts_.find(entry.at("from")), hosts_.find(entry.at("to")),
                                entry.at("bw_bytes_per_s").number(), number_or(entry, "latency_s", 0)});
    }
  }

  void read_data_host(const std::vector<View>& entries) {
    const auto data_host = [&](const View& entry) {
      const auto found = find_inherited(entry, "data_host");
      return found && !found->is_null() ? hosts_.find(*found) : -1;
    };
    problem_.data_host = data_host(entries.front());
    for (const View& entry : entries) {
      if (data_host(entry) != problem_.data_host) root_.fail("the settings have different data hosts");
    }
  }

  void read_widths() {
    problem_.widths.clear();
    const std::size_t layers = problem_.model.mem_bytes.size();
    for (const View& entry : root_.at("widths").items()) {
      Width width;
      width.bits = static_cast<int>(entry.at("bits").whole_number());
      const auto losses = entry.find("loss");
      if (losses && !losses->is_null()) {
        const std::vector<View> items = losses->items();
        if (items.size() + 1 != layers) wrong_count(*losses, items.size(), layers - 1, "cuts between two layers");
        width.loss.push_back(0);  // nothing is compressed where the model begins and ends
        for (const View& item : items) width.loss.push_back(item.is_null() ? kInfinity : item.number());
        width.loss.push_back(0);
      }
      problem_.widths.push_back(std::move(width));
    }
  }

  static Conditions conditions_from(const View& view, const Names& hosts);
  static GivenPlan plan_from(const std::vector<View>& stages);

  const View& root_;
  NamedProblem named_;
  Problem& problem_ = named_.problem;
  Names hosts_;
};

Conditions Reader::conditions_from(const View& view, const Names& hosts) {
  Conditions conditions;
  for (const View& entry : items_of(view, "hosts")) {
    conditions.hosts.push_back(
        {hosts.find(entry.at("host")), number_or(entry, "slowness", 1), number_or(entry, "occupied_bytes", 0)});
  }
  for (const View& entry : items_of(view, "links")) {
    conditions.links.push_back(
        {hosts.find(entry.at("from")), hosts.find(entry.at("to")), number_or(entry, "slowness", 1)});
  }
  if (const auto work = view.find("data_work"); work && !work->is_null()) {
    conditions.data_work = DataWork{number_or(*work, "feed_s", 0), number_or(*work, "collect_s", 0),
                                    number_or(*work, "input_send_s", 0), number_or(*work, "output_receive_s", 0)};
  }
  return conditions;
}

// The layers of a stage: two numbers, from 1, both included.
GivenStage stage_from(const std::string& host, const View& layers) {
  const std::vector<double> range = layers.whole_numbers();
  if (range.size() != 2 || range[0] < 1 || range[1] < range[0] || range[1] > 1e9) {
    layers.fail("are not the first and the last layer of a stage, counted from 1");
  }
  return {host, static_cast<int>(range[0]) - 1, static_cast<int>(range[1]), 0, ""};
}

void read_link(const View& view, GivenStage& stage) {
  stage.bits = static_cast<int>(number_or(view, "quant_bits", 0));
  stage.dtype = text_or(view, "dtype", "");
}

void Reader::put_under(const View& conditions, const Names& hosts, NamedProblem& named) {
  named.problem = with_conditions(std::move(named.problem), conditions_from(conditions, hosts));
  named.running = plan_from(items_of(conditions, "running"));
  named.loaded = plan_from(items_of(conditions, "loaded"));
  for (const View& plan : items_of(conditions, "plans")) named.plans.push_back(plan_from(plan.items()));
  for (const View& one : items_of(conditions, "moments")) named.moments.push_back(conditions_from(one, hosts));
  const std::vector<View> missing = items_of(conditions, "missing");
  if (!missing.empty() && !named.moments.empty()) {
    conditions.fail("has moments, which are of all hosts, and missing ones");
  }
  std::set<int, std::greater<>> gone;  // the last one first, as those behind it are renumbered
  for (const View& host : missing) gone.insert(hosts.find(host));
  for (const int host : gone) named.problem = without_stages_on(std::move(named.problem), host);
}

GivenPlan Reader::plan_from(const std::vector<View>& stages) {
  GivenPlan plan;
  for (const View& entry : stages) {
    plan.push_back(stage_from(entry.at("host").text(), entry.at("layers")));
    read_link(entry, plan.back());
  }
  return plan;
}

void write_known(JsonWriter& json, const char* key, const std::vector<double>& values) {
  if (!values.empty()) json.key(key).numbers(values);
}

void write_bids(JsonWriter& json, const std::vector<double>& stage_s, int layers) {
  json.key("stage_s").open('[');
  for (int first = 0; first < layers; ++first) {
    const auto row = stage_s.begin() + static_cast<std::ptrdiff_t>(first) * (layers + 1);
    json.numbers({row + first + 1, row + layers + 1});
  }
  json.close(']');
}

void write_type(JsonWriter& json, const DeviceType& type) {
  json.open('{');
  json.key("name").value(type.name);
  json.key("dtype").value(type.notes.dtype);
  if (type.notes.threads > 0) json.key("threads").value(type.notes.threads);
  if (!type.notes.kernels.empty()) json.key("kernels").value(type.notes.kernels);
  write_known(json, "tokens", type.notes.tokens);
  json.key("mem_bytes").value(type.mem_bytes);
  json.key("bw_bytes_per_s").value(type.bw_bytes_per_s);
  write_known(json, "weight_bytes", type.weight_bytes);
  json.key("time_s").numbers(type.time_s);
  if (type.overhead_s > 0) json.key("overhead_s").value(type.overhead_s);
  write_known(json, "receive_s", type.receive_s);
  write_known(json, "send_s", type.send_s);
  write_known(json, "activation_bytes", type.activation_bytes);
  write_known(json, "state_bytes", type.state_bytes);
  write_known(json, "loss", type.loss);
  json.key("feed_s").value(type.feed_s);
  json.key("collect_s").value(type.collect_s);
  if (type.input_send_s > 0) json.key("input_send_s").value(type.input_send_s);
  if (type.output_receive_s > 0) json.key("output_receive_s").value(type.output_receive_s);
  if (type.busy_w >= 0) json.key("busy_w").value(type.busy_w);
  if (type.idle_w > 0) json.key("idle_w").value(type.idle_w);
  if (type.load_s_per_byte != DeviceType{}.load_s_per_byte) json.key("load_s_per_byte").value(type.load_s_per_byte);
  if (type.bids()) {
    write_bids(json, type.stage_s, static_cast<int>(type.time_s.size()));
  }
  json.close('}');
}

void write_setting(JsonWriter& json, const Problem& problem, const Setting& setting) {
  json.key("dtype").value(setting.dtype);
  json.key("batch_size").value(setting.batch_size);
  json.key("element_bytes").value(setting.element_bytes);
  if (setting.input_bytes >= 0) json.key("input_bytes").value(setting.input_bytes);
  if (setting.output_bytes >= 0) json.key("output_bytes").value(setting.output_bytes);
  write_known(json, "carried", setting.carried);
  if (setting.waiting != 1) json.key("waiting").value(setting.waiting);
  json.key("buffers_in").value(setting.buffers_in);
  json.key("buffers_out").value(setting.buffers_out);
  json.key("types").open('[');
  for (const DeviceType& type : setting.types) write_type(json, type);
  json.close(']');
  json.key("hosts").open('[');
  for (int host = 0; host < problem.host_count(); ++host) {
    const DeviceType* const type = setting.type(host);
    if (type == nullptr) continue;
    json.open('{').key("name").value(problem.hosts[static_cast<std::size_t>(host)]);
    json.key("type").value(type->name).close('}');
  }
  json.close(']');
}

void write_asides(JsonWriter& json, const char* key, const Problem& problem, const std::vector<Aside>& asides) {
  if (asides.empty()) return;
  json.key(key).open('[');
  for (const Aside& aside : asides) {
    json.open('{').key("name").value(aside.name).key("repeats").value(aside.repeats);
    json.key("fixed_s").value(aside.fixed_s).key("max_s").value(aside.max_s);
    json.key("max_longest_s").value(aside.longest_limit_s).key("settings").open('[');
    for (const Setting& setting : aside.settings) {
      json.open('{');
      write_setting(json, problem, setting);
      json.close('}');
    }
    json.close(']').close('}');
  }
  json.close(']');
}

void write_widths(JsonWriter& json, const Problem& problem) {
  json.key("widths").open('[');
  for (const Width& width : problem.widths) {
    json.open('{').key("bits").value(width.bits);
    if (!width.loss.empty()) json.key("loss").numbers({width.loss.begin() + 1, width.loss.end() - 1});
    json.close('}');
  }
  json.close(']');
  json.key("max_loss").value(problem.max_loss);
  json.key("max_latency_s").value(problem.max_latency_s);
}

}  // namespace

NamedProblem read_problem(std::string text, const std::string& name) {
  const yaml::Document document = yaml::parse(std::move(text), name, kLargestInProblem);
  const View root(document);
  return Reader(root).read();
}

NamedProblem read_problem(const std::string& file, Console& console) {
  return read_problem(text_of(file, console), name_of(file));
}

GivenPlan read_plan(const std::string& file, Console& console) {
  const yaml::Document document = yaml::parse(text_of(file, console), name_of(file));
  GivenPlan plan;
  for (const View& entry : View(document).items()) {
    const auto keys = entry.entries();
    if (keys.empty()) entry.fail("names no host");
    plan.push_back(stage_from(keys.front().first, keys.front().second));
    read_link(entry, plan.back());
  }
  if (plan.empty()) View(document).fail("lists no stage");
  return plan;
}

void apply_conditions(NamedProblem& named, const std::string& file, Console& console) {
  const yaml::Document document = yaml::parse(text_of(file, console), name_of(file), kLargestInProblem);
  Names hosts;
  for (const std::string& host : named.problem.hosts) hosts.add(host);
  try {
    Reader::put_under(View(document), hosts, named);
  } catch (const std::invalid_argument& error) {
    throw UsageError(yaml::printable(name_of(file), 400) + ": " + error.what());
  }
}

void write_left_out(JsonWriter& json, const char* key, const std::vector<yaml::LeftOut>& hosts) {
  json.key(key).open('[');
  for (const yaml::LeftOut& host : hosts) {
    json.open('{').key("host").value(host.host).key("type").value(host.type).key("why").value(host.why).close('}');
  }
  json.close(']');
}

void write_texts(JsonWriter& json, const char* key, const std::vector<std::string>& lines) {
  json.key(key).open('[');
  for (const std::string& line : lines) json.value(line);
  json.close(']');
}

std::string problem_json(const NamedProblem& named) {
  const Problem& problem = named.problem;
  JsonWriter json;
  json.open('{');
  json.key("model").value(named.model);
  json.key("elements_in").value(problem.model.elements_in);
  json.key("elements_out").numbers(problem.model.elements_out);
  json.key("weight_bytes").numbers(problem.model.mem_bytes);
  if (!problem.model.shared_with.empty()) {
    json.key("shared_with").open('[');
    for (const int layer : problem.model.shared_with) json.value(layer + 1);
    json.close(']');
  }
  const bool several = named.joint || problem.settings.size() > 1 || problem.returns();
  if (several) {
    json.key("settings").open('[');
    for (const Setting& setting : problem.settings) {
      json.open('{');
      write_setting(json, problem, setting);
      json.close('}');
    }
    json.close(']');
    write_widths(json, problem);
  } else {
    write_setting(json, problem, problem.settings.front());
  }
  if (problem.returns()) json.key("most_items").value(problem.most_items);
  if (named.texts) {
    json.key("texts").open('{').key("streams").value(named.texts->streams);
    json.key("context").value(named.texts->context).key("prompt_tokens").value(named.texts->prompt);
    json.key("answer_tokens").value(named.texts->answer).close('}');
  }
  write_asides(json, "asides", problem, problem.asides);
  write_asides(json, "either", problem, problem.either);
  write_asides(json, "prompts", problem, problem.prompts);
  write_asides(json, "again", problem, problem.again);
  if (!problem.keeps_caches) json.key("keeps_caches").value(0);
  json.key("links").open('[');
  for (const Link& link : problem.links) {
    json.open('{');
    json.key("from").value(problem.hosts[static_cast<std::size_t>(link.from)]);
    json.key("to").value(problem.hosts[static_cast<std::size_t>(link.to)]);
    json.key("bw_bytes_per_s").value(link.bw_bytes_per_s);
    json.key("latency_s").value(link.latency_s);
    json.close('}');
  }
  json.close(']');
  if (problem.data_host >= 0) {
    json.key("data_host").value(problem.hosts[static_cast<std::size_t>(problem.data_host)]);
  }
  write_left_out(json, "left_out", named.left_out);
  write_texts(json, "warnings", named.warnings);
  json.close('}');
  return json.text();
}

std::string bids_json(const Problem& problem) {
  const Setting& setting = problem.settings.front();
  JsonWriter json;
  json.open('{').key("bids").open('[');
  for (int host = 0; host < problem.host_count(); ++host) {
    if (setting.type(host) == nullptr) continue;
    json.open('{').key("type").value(problem.hosts[static_cast<std::size_t>(host)]);
    write_bids(json, stage_table(problem, host, 0), problem.layers());
    json.close('}');
  }
  json.close(']');
  std::vector<double> bytes;
  for (int cut = 0; cut <= problem.layers(); ++cut) bytes.push_back(cut_bytes(problem, setting, cut));
  json.key("cut_bytes").numbers(bytes);
  json.close('}');
  return json.text();
}

}  // namespace pipeedge::cli
