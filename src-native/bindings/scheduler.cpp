// schedule(): takes flat numpy arrays, and returns plain values.
//
// Arguments are copied to the core's types before the interpreter lock is released, so no Python object is
// used without it.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cmath>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../core/lengths.hpp"
#include "../core/link_bits.hpp"
#include "../core/number_types.hpp"
#include "../core/problem.hpp"
#include "module.hpp"

namespace py = pybind11;

namespace {

using Doubles = py::array_t<double, py::array::c_style | py::array::forcecast>;
using Integers = py::array_t<std::int64_t, py::array::c_style | py::array::forcecast>;

std::string shape_of(const py::array& array) {
  std::string text = "(";
  for (py::ssize_t d = 0; d < array.ndim(); ++d) {
    text += (d > 0 ? ", " : "") + std::to_string(array.shape(d));
  }
  return text + ")";
}

void require_shape(const py::array& array, const char* name, const std::vector<py::ssize_t>& shape,
                   const char* meaning) {
  bool matches = array.ndim() == static_cast<py::ssize_t>(shape.size());
  for (std::size_t d = 0; matches && d < shape.size(); ++d) {
    matches = array.shape(static_cast<py::ssize_t>(d)) == shape[d];
  }
  if (matches) return;
  std::string wanted = "(";
  for (std::size_t d = 0; d < shape.size(); ++d) wanted += (d > 0 ? ", " : "") + std::to_string(shape[d]);
  throw py::value_error(std::string(name) + " has the shape " + shape_of(array) + ", not " + meaning + " = " +
                        wanted + ")");
}

std::vector<double> to_vector(const Doubles& array) {
  return std::vector<double>(array.data(), array.data() + array.size());
}

int to_index(std::int64_t value, const char* name) {
  if (value < -1 || value > INT32_MAX) {
    throw py::value_error(std::string(name) + " holds " + std::to_string(value) + ", which is no index");
  }
  return static_cast<int>(value);
}

py::ssize_t length_of(const py::array& array, const char* name) {
  if (array.ndim() != 1) {
    throw py::value_error(std::string(name) + " has the shape " + shape_of(array) + ", not one dimension");
  }
  return array.shape(0);
}

pipeedge::Problem to_problem(const Doubles& mem_bytes, const Doubles& elements_out, double elements_in,
                             const Doubles& type_mem_bytes, const Doubles& type_bw_bytes_per_s,
                             const Doubles& type_time_s, const Integers& host_types, const Integers& link_hosts,
                             const Doubles& link_bw_bytes_per_s, const Doubles& link_latency_s,
                             std::optional<std::int64_t> data_host, double batch_size, double element_bytes,
                             double buffers_in, double buffers_out, const Doubles& type_receive_s,
                             const Doubles& type_send_s, const Doubles& type_activation_bytes,
                             const Doubles& type_stage_s, const Doubles& type_feed_s,
                             const Doubles& type_collect_s, const Doubles& type_input_send_s,
                             const Doubles& type_output_receive_s, std::optional<double> input_bytes) {
  const py::ssize_t layers = length_of(mem_bytes, "mem_bytes");
  const py::ssize_t types = length_of(type_mem_bytes, "type_mem_bytes");
  const py::ssize_t hosts = length_of(host_types, "host_types");
  const py::ssize_t links = length_of(link_bw_bytes_per_s, "link_bw_bytes_per_s");
  require_shape(elements_out, "elements_out", {layers}, "(layers,)");
  require_shape(type_bw_bytes_per_s, "type_bw_bytes_per_s", {types}, "(types,)");
  for (const auto& [table, name] : {std::pair{&type_feed_s, "type_feed_s"},
                                    {&type_collect_s, "type_collect_s"},
                                    {&type_input_send_s, "type_input_send_s"},
                                    {&type_output_receive_s, "type_output_receive_s"}}) {
    if (table->size() > 0) require_shape(*table, name, {types}, "(types,)");
  }
  require_shape(type_time_s, "type_time_s", {types, layers}, "(types, layers)");
  require_shape(link_hosts, "link_hosts", {links, 2}, "(links, 2)");
  require_shape(link_latency_s, "link_latency_s", {links}, "(links,)");

  const auto layers_of = [&](const Doubles& table, const char* name, py::ssize_t t) {
    if (table.size() == 0) return std::vector<double>{};
    require_shape(table, name, {types, layers}, "(types, layers)");
    return std::vector<double>(table.data() + t * layers, table.data() + (t + 1) * layers);
  };

  pipeedge::Problem problem;
  problem.model.mem_bytes = to_vector(mem_bytes);
  problem.model.elements_out = to_vector(elements_out);
  problem.model.elements_in = elements_in;
  for (py::ssize_t t = 0; t < types; ++t) {
    pipeedge::DeviceType type;
    type.mem_bytes = type_mem_bytes.at(t);
    type.bw_bytes_per_s = type_bw_bytes_per_s.at(t);
    const double* times = type_time_s.data() + t * layers;
    type.time_s.assign(times, times + layers);
    type.receive_s = layers_of(type_receive_s, "type_receive_s", t);
    type.send_s = layers_of(type_send_s, "type_send_s", t);
    type.activation_bytes = layers_of(type_activation_bytes, "type_activation_bytes", t);
    if (type_stage_s.size() > 0) {
      require_shape(type_stage_s, "type_stage_s", {types, layers + 1, layers + 1},
                    "(types, layers + 1, layers + 1)");
      const py::ssize_t cells = (layers + 1) * (layers + 1);
      type.stage_s.assign(type_stage_s.data() + t * cells, type_stage_s.data() + (t + 1) * cells);
    }
    if (type_feed_s.size() > 0) type.feed_s = type_feed_s.at(t);
    if (type_collect_s.size() > 0) type.collect_s = type_collect_s.at(t);
    if (type_input_send_s.size() > 0) type.input_send_s = type_input_send_s.at(t);
    if (type_output_receive_s.size() > 0) type.output_receive_s = type_output_receive_s.at(t);
    problem.types.push_back(std::move(type));
  }
  for (py::ssize_t h = 0; h < hosts; ++h) {
    problem.hosts.push_back({"", to_index(host_types.at(h), "host_types")});
  }
  for (py::ssize_t i = 0; i < links; ++i) {
    problem.links.push_back({to_index(link_hosts.at(i, 0), "link_hosts"),
                             to_index(link_hosts.at(i, 1), "link_hosts"), link_bw_bytes_per_s.at(i),
                             link_latency_s.at(i)});
  }
  if (data_host) {
    if (*data_host < 0) throw py::value_error("data_host is negative; None means none");
    problem.data_host = to_index(*data_host, "data_host");
  }
  problem.batch_size = batch_size;
  problem.element_bytes = element_bytes;
  if (input_bytes) {
    if (*input_bytes < 0) throw py::value_error("input_bytes is negative; None means elements_in * element_bytes");
    problem.input_bytes = *input_bytes;
  }
  problem.buffers_in = buffers_in;
  problem.buffers_out = buffers_out;
  pipeedge::validate(problem);
  return problem;
}

const char* name_of(pipeedge::Status status) {
  switch (status) {
    case pipeedge::Status::kOptimal:
      return "optimal";
    case pipeedge::Status::kBounded:
      return "bounded";
    case pipeedge::Status::kInfeasible:
      return "infeasible";
    case pipeedge::Status::kUnknown:
      break;
  }
  return "unknown";
}

pipeedge::Objective to_objective(const std::string& name) {
  if (name == "throughput") return pipeedge::Objective::kThroughput;
  if (name == "latency") return pipeedge::Objective::kLatency;
  throw py::value_error("objective is '" + name + "', not 'throughput' or 'latency'");
}

struct ScheduleResult {
  pipeedge::Solution solution;
  std::vector<int> cut_bits;

  // Bits per value after each stage except the last; 0: uncompressed.
  std::vector<int> link_bits() const {
    std::vector<int> bits;
    for (std::size_t s = 0; s + 1 < solution.stages.size(); ++s) {
      bits.push_back(cut_bits[static_cast<std::size_t>(solution.stages[s].last)]);
    }
    return bits;
  }

  py::array_t<std::int64_t> stages() const {
    const auto count = static_cast<py::ssize_t>(solution.stages.size());
    py::array_t<std::int64_t> rows(std::vector<py::ssize_t>{count, 3});
    auto view = rows.mutable_unchecked<2>();
    for (py::ssize_t s = 0; s < count; ++s) {
      const pipeedge::Stage& stage = solution.stages[static_cast<std::size_t>(s)];
      view(s, 0) = stage.host;
      view(s, 1) = stage.first;
      view(s, 2) = stage.last;
    }
    return rows;
  }
};

ScheduleResult schedule(const Doubles& mem_bytes, const Doubles& elements_out, double elements_in,
                        const Doubles& type_mem_bytes, const Doubles& type_bw_bytes_per_s,
                        const Doubles& type_time_s, const Integers& host_types, const Integers& link_hosts,
                        const Doubles& link_bw_bytes_per_s, const Doubles& link_latency_s,
                        std::optional<std::int64_t> data_host, double batch_size, double element_bytes,
                        double buffers_in, double buffers_out, const std::string& objective,
                        double time_limit_s, const Doubles& type_receive_s, const Doubles& type_send_s,
                        const Doubles& type_activation_bytes, const Doubles& type_stage_s,
                        std::optional<int> link_bits, const Doubles& type_feed_s,
                        const Doubles& type_collect_s, const Doubles& type_input_send_s,
                        const Doubles& type_output_receive_s, std::optional<double> input_bytes) {
  const pipeedge::Problem problem =
      to_problem(mem_bytes, elements_out, elements_in, type_mem_bytes, type_bw_bytes_per_s, type_time_s,
                 host_types, link_hosts, link_bw_bytes_per_s, link_latency_s, data_host, batch_size,
                 element_bytes, buffers_in, buffers_out, type_receive_s, type_send_s, type_activation_bytes,
                 type_stage_s, type_feed_s, type_collect_s, type_input_send_s, type_output_receive_s, input_bytes);
  pipeedge::Options options;
  options.objective = to_objective(objective);
  options.time_limit_s = time_limit_s;
  if (!std::isfinite(time_limit_s) || time_limit_s < 0) {
    throw py::value_error("time_limit_s is not a number of seconds");
  }
  if (!link_bits && options.objective == pipeedge::Objective::kLatency) {
    throw py::value_error("for latency, fewer bits are always better: say how many, as link_bits");
  }
  py::gil_scoped_release unlocked;
  if (!link_bits) {
    pipeedge::AutoBits found = pipeedge::solve_with_auto_bits(problem, options);
    return {std::move(found.solution), std::move(found.problem.cut_bits)};
  }
  const pipeedge::Problem asked = pipeedge::with_link_bits(problem, *link_bits);
  return {pipeedge::solve(asked, options), asked.cut_bits};
}

}  // namespace

void bind_scheduler(py::module_& module) {
  py::class_<ScheduleResult>(module, "ScheduleResult", "A schedule, with its proven bound.")
      .def_property_readonly("status", [](const ScheduleResult& r) { return name_of(r.solution.status); })
      .def_property_readonly("stages", &ScheduleResult::stages)
      .def_property_readonly("link_bits", &ScheduleResult::link_bits)
      .def_property_readonly("objective_s", [](const ScheduleResult& r) { return r.solution.objective; })
      .def_property_readonly("lower_bound_s", [](const ScheduleResult& r) { return r.solution.lower_bound; })
      .def_property_readonly("gap", [](const ScheduleResult& r) { return r.solution.gap(); })
      .def_property_readonly("bottleneck_s", [](const ScheduleResult& r) { return r.solution.bottleneck_s; })
      .def_property_readonly("latency_s", [](const ScheduleResult& r) { return r.solution.latency_s; })
      .def_property_readonly("elapsed_s", [](const ScheduleResult& r) { return r.solution.elapsed_s; });

  module.def(
      "at_length",
      [](const std::vector<double>& lengths, const std::vector<double>& values, double wanted, int layer) {
        const auto growth = layer < 0 ? pipeedge::Growth::kLinear : pipeedge::growth_of(layer);
        return pipeedge::at_length(lengths, values, wanted, growth);
      },
      "Scale a layer's cost to sentences of another length (see _native.pyi).", py::arg("lengths"),
      py::arg("values"), py::arg("wanted"), py::arg("layer"));

  module.def(
      "element_bytes",
      [] {
        py::dict found;
        for (const pipeedge::NumberType& type : pipeedge::number_types()) {
          found[type.name] = static_cast<int>(type.element_bytes);
        }
        return found;
      },
      "Return the bytes of a value that crosses a cut, by number type (see _native.pyi).");
  module.def(
      "scaled_weights",
      [](const std::string& dtype, std::vector<double> float32_bytes) {
        const pipeedge::NumberType* type = pipeedge::find_number_type(dtype);
        if (type == nullptr) throw py::value_error("unknown number type '" + dtype + "'");
        return pipeedge::scaled_weights(*type, std::move(float32_bytes));
      },
      "Estimate the bytes of weights in a number type (see _native.pyi).", py::arg("dtype"), py::arg("float32_bytes"));

  const Integers no_hosts(std::vector<py::ssize_t>{0, 2});
  const Doubles no_numbers(py::ssize_t{0});
  module.def("schedule", &schedule, "Find the best schedule of a model's layers on hosts (see _native.pyi).",
             py::kw_only(), py::arg("mem_bytes"), py::arg("elements_out"), py::arg("elements_in"),
             py::arg("type_mem_bytes"), py::arg("type_bw_bytes_per_s"), py::arg("type_time_s"),
             py::arg("host_types"), py::arg("link_hosts") = no_hosts,
             py::arg("link_bw_bytes_per_s") = no_numbers, py::arg("link_latency_s") = no_numbers,
             py::arg("data_host") = py::none(), py::arg("batch_size") = 8.0, py::arg("element_bytes") = 4.0,
             py::arg("buffers_in") = 2.0, py::arg("buffers_out") = 2.0, py::arg("objective") = "throughput",
             py::arg("time_limit_s") = 10.0, py::arg("type_receive_s") = no_numbers,
             py::arg("type_send_s") = no_numbers, py::arg("type_activation_bytes") = no_numbers,
             py::arg("type_stage_s") = no_numbers, py::arg("link_bits") = 0,
             py::arg("type_feed_s") = no_numbers, py::arg("type_collect_s") = no_numbers,
             py::arg("type_input_send_s") = no_numbers, py::arg("type_output_receive_s") = no_numbers,
             py::arg("input_bytes") = py::none());
}
