// The stages and heads of decoders for numpy arrays, without copies, and without the interpreter lock while they compute.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../decoder/stage.hpp"
#include "arrays.hpp"
#include "module.hpp"

namespace py = pybind11;
namespace decoder = pipeedge::decoder;

namespace {

using decoder::Half;
using decoder::Matrix;
using decoder::Type;
using pipeedge::bindings::require;

constexpr const char* kHalfType = "uint16 (the bits of bfloat16)";

Type type_of(const std::string& name) {
  if (name == "float32") return Type::kFloat32;
  if (name == "bfloat16") return Type::kBfloat16;
  if (name == "int8") return Type::kInt8;
  if (name == "int4") return Type::kInt4;
  throw py::value_error("there is no number type '" + name + "' here: float32, bfloat16, int8 and int4 are possible");
}

decoder::Activation activation_of(const std::string& name) {
  if (name == "none") return decoder::Activation::kNone;
  if (name == "gelu") return decoder::Activation::kGelu;
  if (name == "gelu_tanh") return decoder::Activation::kGeluTanh;
  if (name == "relu") return decoder::Activation::kRelu;
  if (name == "silu") return decoder::Activation::kSilu;
  throw py::value_error("there is no activation '" + name + "' here");
}

decoder::HeadNorm head_norm_of(const std::string& name) {
  if (name == "none") return decoder::HeadNorm::kNone;
  if (name == "each") return decoder::HeadNorm::kEachHead;
  if (name == "all") return decoder::HeadNorm::kAllHeads;
  throw py::value_error("there is no norm of heads '" + name + "': none, each and all are possible");
}

std::size_t positive(py::ssize_t value, const char* name) {
  if (value < 1) throw py::value_error(std::string(name) + " is " + std::to_string(value) + ": at least 1 is needed");
  return static_cast<std::size_t>(value);
}

std::size_t not_negative(py::ssize_t value, const char* name) {
  if (value < 0) throw py::value_error(std::string(name) + " is " + std::to_string(value) + ", below 0");
  return static_cast<std::size_t>(value);
}

const decoder::Variant& variant_of(const std::optional<std::string>& name) {
  if (!name) return decoder::best_variant();
  const decoder::Variant* found = decoder::find_variant(*name);
  if (found == nullptr) throw py::value_error("this processor has no variant '" + *name + "' of decoders");
  return *found;
}

const void* values_of(const py::array& array, const char* name, Type stream, std::size_t size) {
  if (stream == Type::kFloat32) {
    require<float>(array, name, "float32", size, false);
  } else {
    require<Half>(array, name, kHalfType, size, false);
  }
  return array.data();
}

void* room_in(py::array& array, const char* name, Type stream, std::size_t size) {
  if (stream == Type::kFloat32) {
    require<float>(array, name, "float32", size, true);
  } else {
    require<Half>(array, name, kHalfType, size, true);
  }
  return array.mutable_data();
}

const decoder::Coding& coding_of(const std::string& name) {
  const decoder::Coding* found = decoder::find_coding(name);
  if (found == nullptr) throw py::value_error("there is no coding '" + name + "'");
  return *found;
}

/// Bytes of a row of so many weights.
std::size_t coded_bytes(const decoder::Coding& coding, std::size_t width) {
  return (width + coding.values - 1) / coding.values * coding.bytes;
}

void fill_matrix(Matrix& matrix, const std::string& name, py::ssize_t first, const py::array& values,
                 py::ssize_t threads, const std::optional<std::string>& coding_name) {
  if (matrix.inputs() == 0) throw py::value_error("there is no " + name + " here");
  const decoder::Coding* coding = coding_name ? &coding_of(*coding_name) : nullptr;
  const std::size_t width = coding == nullptr ? matrix.inputs() : coded_bytes(*coding, matrix.inputs());
  if (values.ndim() != 2 || static_cast<std::size_t>(values.shape(1)) != width) {
    throw py::value_error(name + " is not a matrix of " + std::to_string(matrix.inputs()) + " inputs");
  }
  const auto count = static_cast<std::size_t>(values.shape(0));
  const std::size_t from = not_negative(first, "the first row");
  if (from > matrix.outputs() || count > matrix.outputs() - from) {
    throw py::value_error(name + " has " + std::to_string(matrix.outputs()) + " outputs, fewer than are given");
  }
  const std::size_t most = positive(threads, "threads");
  if (coding != nullptr) {
    require<std::uint8_t>(values, name.c_str(), "uint8 (coded)", count * width, false);
    const auto* rows = static_cast<const std::uint8_t*>(values.data());
    bool finite;
    {
      py::gil_scoped_release unlocked;
      finite = matrix.pack(from, count, *coding, rows, most);
    }
    if (!finite) throw py::value_error("weights are not finite");
    return;
  }
  const bool halves = !py::isinstance<py::array_t<float>>(values);
  const void* data =
      values_of(values, name.c_str(), halves ? Type::kBfloat16 : Type::kFloat32, count * matrix.inputs());
  py::gil_scoped_release unlocked;
  if (halves) {
    matrix.pack(from, count, static_cast<const Half*>(data), most);
  } else {
    matrix.pack(from, count, static_cast<const float*>(data), most);
  }
}

void fill_vector(std::vector<float>& vector, const std::string& name, py::ssize_t first, const py::array& values) {
  const auto count = static_cast<std::size_t>(values.size());
  require<float>(values, name.c_str(), "float32", count, false);
  const std::size_t from = not_negative(first, "the first value");
  vector.resize(std::max(vector.size(), from + count));
  std::copy_n(static_cast<const float*>(values.data()), count, vector.begin() + static_cast<std::ptrdiff_t>(from));
}

/// Frequencies, factor, and, for dynamic scaling, the positions it begins behind, the base and the stretch.
using Rotation = std::tuple<std::vector<float>, float, py::ssize_t, double, double>;
/// Rotation, or -1, and window, or 0.
using BlockShape = std::tuple<int, py::ssize_t>;
using Pages = py::array_t<std::int32_t>;
/// Pages, pages of windows, position of the first row, rows.
using Rows = std::tuple<Pages, Pages, py::ssize_t, py::ssize_t>;

class Stage {
 public:
  Stage(py::ssize_t hidden, py::ssize_t heads, py::ssize_t kv_heads, py::ssize_t head_size, py::ssize_t inner,
        const std::string& weights, const std::string& stream, bool norm_centred, float eps,
        const std::string& head_norm, bool gated, const std::string& activation, float scale, float score_cap,
        float residual_scale, const std::vector<Rotation>& rotations, py::ssize_t temper_from, float temper,
        const std::vector<BlockShape>& blocks, py::ssize_t first, py::ssize_t end, py::ssize_t pages,
        py::ssize_t window_pages)
      : stage_(make(hidden, heads, kv_heads, head_size, inner, weights, stream, norm_centred, eps, head_norm, gated,
                    activation, scale, score_cap, residual_scale, rotations, temper_from, temper, blocks, first, end,
                    pages, window_pages)) {}

  void fill(py::ssize_t number, const std::string& name, py::ssize_t first, const py::array& values,
            py::ssize_t threads, const std::optional<std::string>& coding) {
    decoder::Block& block = block_of(number);
    Matrix* matrix = matrix_of(block, name);
    if (matrix != nullptr) return fill_matrix(*matrix, name, first, values, threads, coding);
    const std::pair<const char*, std::vector<float>*> vectors[] = {
        {"qkv_bias", &block.qkv_bias},   {"proj_bias", &block.proj_bias},
        {"gate_bias", &block.gate_bias}, {"up_bias", &block.up_bias},
        {"down_bias", &block.down_bias}, {"attention_norm", &block.attention_norm},
        {"mlp_norm", &block.mlp_norm},   {"attention_end", &block.attention_end},
        {"mlp_end", &block.mlp_end},     {"query_norm", &block.query_norm},
        {"key_norm", &block.key_norm}};
    for (const auto& [own, vector] : vectors) {
      if (name == own) return fill_vector(*vector, name, first, values);
    }
    throw py::value_error("a block has no '" + name + "'");
  }

  void step(const std::vector<Rows>& sequences, const std::vector<py::array>& inputs, std::vector<py::array> outputs,
            py::ssize_t threads, const std::optional<std::string>& name, std::optional<py::array> seconds,
            bool processor_time, py::ssize_t layers) {
    std::vector<decoder::Sequence> own;
    std::size_t rows = 0;
    for (const Rows& one : sequences) {
      own.push_back(sequence_of(one));
      rows += own.back().rows;
    }
    const Type stream = stage_.settings().stream;
    const std::size_t hidden = stage_.settings().hidden;
    const std::size_t first = stage_.first(), end = stage_.end();
    if (inputs.size() != (stage_.has_skip_after(first) ? 2 : 1) ||
        outputs.size() != (stage_.has_skip_after(end) ? 2 : 1)) {
      throw py::value_error("the payload has another number of arrays");
    }
    decoder::Payload in;
    decoder::Result out;
    in.first = values_of(inputs[0], "the input", stream, rows * stage_.width_after(first));
    if (inputs.size() > 1) in.second = values_of(inputs[1], "the second input", stream, rows * hidden);
    out.first = room_in(outputs[0], "the output", stream, rows * stage_.width_after(end));
    if (outputs.size() > 1) out.second = room_in(outputs[1], "the second output", stream, rows * hidden);
    const decoder::Variant& variant = variant_of(name);
    const std::size_t count = positive(threads, "threads");
    const std::size_t most = layers < 0 ? end : first + static_cast<std::size_t>(layers);
    double* layer_s = nullptr;
    if (seconds) {
      require<double>(*seconds, "seconds", "float64", end - first, true);
      layer_s = static_cast<double*>(seconds->mutable_data());
    }
    py::gil_scoped_release unlocked;
    const std::lock_guard<std::mutex> alone(mutex_);
    stage_.step(variant, own, in, out, count, layer_s, processor_time, most);
  }

  void clear_cache() {
    py::gil_scoped_release unlocked;
    const std::lock_guard<std::mutex> alone(mutex_);
    stage_.clear_cache();
  }

  std::size_t cache_bytes() const { return stage_.cache_bytes(); }
  std::size_t page_bytes() const { return stage_.page_bytes(); }
  void widen(py::ssize_t number, const std::string& name) {
    Matrix* matrix = matrix_of(block_of(number), name);
    if (matrix == nullptr || matrix->inputs() == 0) throw py::value_error("there is no " + name + " here");
    if (matrix->type() == Type::kInt4) *matrix = Matrix(Type::kInt8, matrix->outputs(), matrix->inputs());
  }

  std::size_t weight_bytes() const { return stage_.weight_bytes(); }

  void adopt(py::ssize_t layer, const Stage& other, py::ssize_t others_layer) {
    const std::size_t own = not_negative(layer, "the layer"), theirs = not_negative(others_layer, "the other layer");
    const auto has = [](const decoder::Stage& stage, std::size_t one) {
      return stage.first() <= one && one < stage.end();
    };
    if (!has(stage_, own) || !has(other.stage_, theirs) || own % decoder::kLayers != theirs % decoder::kLayers) {
      throw py::value_error("a stage does not have the layer");
    }
    if (other.stage_.pages() < stage_.pages() || other.stage_.window_pages() < stage_.window_pages()) {
      throw py::value_error("the other stage has fewer pages");
    }
    const decoder::Settings &here = stage_.settings(), &there = other.stage_.settings();
    if (here.weights != there.weights || here.hidden != there.hidden || here.inner != there.inner ||
        here.heads != there.heads || here.kv_heads != there.kv_heads || here.head_size != there.head_size) {
      throw py::value_error("the other stage is of another model or number type");
    }
    stage_.adopt(own, other.stage_, theirs);
  }

  // Not behind the mutex: a step need not wait for a copy. Who copies a page while a step writes it drops the copy.
  void read_page(py::ssize_t first, py::ssize_t blocks, py::ssize_t page, py::array& values) {
    const std::vector<char*> places = places_of(first, blocks, page);
    const std::size_t size = stage_.page_bytes();
    require<std::uint8_t>(values, "values", "uint8", places.size() * size, true);
    auto* to = static_cast<char*>(values.mutable_data());
    py::gil_scoped_release unlocked;
    for (std::size_t i = 0; i < places.size(); ++i) std::copy_n(places[i], size, to + i * size);
  }

  void write_page(py::ssize_t first, py::ssize_t blocks, py::ssize_t page, const py::array& values) {
    const std::vector<char*> places = places_of(first, blocks, page);
    const std::size_t size = stage_.page_bytes();
    require<std::uint8_t>(values, "values", "uint8", places.size() * size, false);
    const auto* from = static_cast<const char*>(values.data());
    py::gil_scoped_release unlocked;
    for (std::size_t i = 0; i < places.size(); ++i) std::copy_n(from + i * size, size, places[i]);
  }

 private:
  /// Places of a page in blocks that attend to everything; blocks without a cache here have none.
  std::vector<char*> places_of(py::ssize_t first, py::ssize_t blocks, py::ssize_t page) {
    const std::size_t number = not_negative(page, "the page");
    if (number >= stage_.pages()) throw py::value_error("there is no page " + std::to_string(page));
    std::vector<char*> places;
    for (py::ssize_t i = first; i < first + blocks; ++i) {
      if (block_of(i).window != 0) throw py::value_error("a block has a window");
      if (char* place = stage_.page(static_cast<std::size_t>(i), number)) places.push_back(place);
    }
    return places;
  }

  decoder::Block& block_of(py::ssize_t number) {
    if (number < 0 || static_cast<std::size_t>(number) >= stage_.blocks()) {
      throw py::value_error("there is no block " + std::to_string(number));
    }
    return stage_.block(static_cast<std::size_t>(number));
  }

  /// A matrix of a block, or null if it has none of that name.
  static Matrix* matrix_of(decoder::Block& block, const std::string& name) {
    const std::pair<const char*, Matrix*> matrices[] = {
        {"qkv", &block.qkv}, {"proj", &block.proj}, {"gate", &block.gate}, {"up", &block.up}, {"down", &block.down}};
    for (const auto& [own, matrix] : matrices) {
      if (name == own) return matrix;
    }
    return nullptr;
  }

  static decoder::Stage make(py::ssize_t hidden, py::ssize_t heads, py::ssize_t kv_heads, py::ssize_t head_size,
                             py::ssize_t inner, const std::string& weights, const std::string& stream,
                             bool norm_centred, float eps, const std::string& head_norm, bool gated,
                             const std::string& activation, float scale, float score_cap, float residual_scale,
                             const std::vector<Rotation>& rotations, py::ssize_t temper_from, float temper,
                             const std::vector<BlockShape>& blocks, py::ssize_t first, py::ssize_t end,
                             py::ssize_t pages, py::ssize_t window_pages) {
    decoder::Settings settings;
    settings.hidden = positive(hidden, "hidden");
    settings.heads = positive(heads, "heads");
    settings.kv_heads = positive(kv_heads, "kv_heads");
    settings.head_size = positive(head_size, "head_size");
    settings.inner = positive(inner, "inner");
    if (settings.heads % settings.kv_heads != 0) throw py::value_error("heads is not a multiple of kv_heads");
    settings.weights = type_of(weights);
    settings.stream = type_of(stream);
    if (settings.stream != Type::kFloat32 && settings.stream != Type::kBfloat16)
      throw py::value_error("hidden states are float32 or bfloat16");
    settings.norm_centred = norm_centred;
    settings.eps = eps;
    settings.head_norm = head_norm_of(head_norm);
    settings.gated = gated;
    settings.activation = activation_of(activation);
    settings.scale = scale;
    settings.score_cap = score_cap;
    settings.residual_scale = residual_scale;
    settings.temper_from = not_negative(temper_from, "temper_from");
    settings.temper = temper;
    for (const auto& [frequencies, factor, dynamic_from, base, stretch] : rotations) {
      if (2 * frequencies.size() > settings.head_size) throw py::value_error("more values are rotated than heads have");
      decoder::Rotation rotation;
      rotation.frequencies = frequencies;
      rotation.factor = factor;
      rotation.dynamic_from = not_negative(dynamic_from, "dynamic_from");
      rotation.base = base;
      rotation.stretch = stretch;
      settings.rotations.push_back(rotation);
    }
    std::vector<decoder::Block> own;
    for (const auto& [rotation, window] : blocks) {
      decoder::Block block;
      if (rotation >= static_cast<int>(rotations.size())) throw py::value_error("a block has an unknown rotation");
      block.rotation = rotation;
      block.window = not_negative(window, "window");
      own.push_back(std::move(block));
    }
    const std::size_t from = not_negative(first, "first"), to = positive(end, "end");
    if (from >= decoder::kLayers || from >= to || to > own.size() * decoder::kLayers) {
      throw py::value_error("the layers are not those of the blocks");
    }
    return decoder::Stage(std::move(settings), std::move(own), from, to, not_negative(pages, "pages"),
                          not_negative(window_pages, "window_pages"));
  }

  /// Checks that the pages that a step needs are there.
  static void check_pages(const Pages& pages, std::size_t count, std::size_t pool, const char* name) {
    require<std::int32_t>(pages, name, "int32", static_cast<std::size_t>(pages.size()), false);
    if (static_cast<std::size_t>(pages.size()) < count) {
      throw py::value_error(std::string(name) + " are " + std::to_string(pages.size()) + ", the rows need " +
                            std::to_string(count));
    }
    for (py::ssize_t i = 0; i < pages.size(); ++i) {
      const std::int32_t page = pages.data()[i];
      if (page < 0 || static_cast<std::size_t>(page) >= pool) {
        throw py::value_error(std::string(name) + " have number " + std::to_string(page) + " of a pool of " +
                              std::to_string(pool));
      }
    }
  }

  decoder::Sequence sequence_of(const Rows& rows) const {
    const auto& [pages, window_pages, position, count] = rows;
    decoder::Sequence one;
    one.position = not_negative(position, "a position");
    one.rows = not_negative(count, "the number of rows");
    const std::size_t needed = (one.position + one.rows + decoder::kPage - 1) / decoder::kPage;
    check_pages(pages, stage_.attends(false) ? needed : 0, stage_.pages(), "pages");
    check_pages(window_pages, stage_.attends(true) ? needed : 0, stage_.window_pages(), "pages of windows");
    one.pages = pages.data();
    one.page_count = static_cast<std::size_t>(pages.size());
    one.window_pages = window_pages.data();
    one.window_page_count = static_cast<std::size_t>(window_pages.size());
    return one;
  }

  decoder::Stage stage_;
  std::mutex mutex_;
};

class Head {
 public:
  Head(const std::string& weights, const std::string& stream, py::ssize_t hidden, py::ssize_t tokens, bool norm_centred,
       float eps, float scale, float cap)
      : head_(type_of(weights), type_of(stream), positive(hidden, "hidden"), positive(tokens, "tokens"), norm_centred,
              eps, scale, cap) {}

  void fill(const std::string& name, py::ssize_t first, const py::array& values, py::ssize_t threads,
            const std::optional<std::string>& coding) {
    if (name == "weight") return fill_matrix(head_.matrix(), name, first, values, threads, coding);
    if (name == "bias") return fill_vector(head_.bias(), name, first, values);
    if (name == "norm") return fill_vector(head_.norm(), name, first, values);
    throw py::value_error("a head has no '" + name + "'");
  }

  void score(const py::array& hidden, py::array& scores, py::ssize_t threads, const std::optional<std::string>& name) {
    const std::size_t rows = static_cast<std::size_t>(hidden.size()) / head_.hidden();
    const void* from = values_of(hidden, "hidden", head_.stream(), rows * head_.hidden());
    require<float>(scores, "scores", "float32", rows * head_.matrix().outputs(), true);
    auto* to = static_cast<float*>(scores.mutable_data());
    const decoder::Variant& variant = variant_of(name);
    const std::size_t count = positive(threads, "threads");
    py::gil_scoped_release unlocked;
    const std::lock_guard<std::mutex> alone(mutex_);
    head_.score(variant, from, rows, to, count);
  }

  std::size_t weight_bytes() const { return head_.matrix().bytes(); }

 private:
  decoder::Head head_;
  std::mutex mutex_;
};

/// Names of the forms of rows, with the weights and the bytes of a unit.
std::vector<std::tuple<std::string, std::size_t, std::size_t>> weight_codings() {
  std::vector<std::tuple<std::string, std::size_t, std::size_t>> found;
  for (const decoder::Coding* coding = decoder::best_variant().codings; coding->name != nullptr; ++coding) {
    found.emplace_back(coding->name, coding->values, coding->bytes);
  }
  return found;
}

py::array_t<float> decode_rows(const std::string& name, const py::array& rows, py::ssize_t width) {
  const decoder::Coding& coding = coding_of(name);
  const std::size_t values = positive(width, "the width"), bytes = coded_bytes(coding, values);
  if (rows.ndim() != 2 || static_cast<std::size_t>(rows.shape(1)) != bytes) {
    throw py::value_error("rows of " + std::to_string(values) + " weights have " + std::to_string(bytes) + " bytes");
  }
  const auto count = static_cast<std::size_t>(rows.shape(0));
  require<std::uint8_t>(rows, "rows", "uint8", count * bytes, false);
  py::array_t<float> out({count, values});
  const auto* from = static_cast<const std::uint8_t*>(rows.data());
  float* to = out.mutable_data();
  py::gil_scoped_release unlocked;
  std::vector<float> unit(coding.values);
  for (std::size_t row = 0; row < count; ++row, from += bytes, to += values) {
    for (std::size_t k = 0; k < values; k += coding.values) {
      coding.decode(from + k / coding.values * coding.bytes, unit.data());
      std::copy_n(unit.data(), std::min(coding.values, values - k), to + k);
    }
  }
  return out;
}

py::array_t<std::uint8_t> encode_rows(const std::string& name, const py::array& rows, py::ssize_t threads) {
  const Type type = type_of(name);
  if (type != Type::kInt8 && type != Type::kInt4) throw py::value_error("rows are encoded as int8 or int4");
  if (rows.ndim() != 2) throw py::value_error("rows are not a matrix");
  const auto count = static_cast<std::size_t>(rows.shape(0)), width = static_cast<std::size_t>(rows.shape(1));
  const std::size_t bytes = coded_bytes(coding_of(name), width);
  Matrix matrix(type, count, width);
  fill_matrix(matrix, "rows", 0, rows, threads, std::nullopt);
  py::array_t<std::uint8_t> out({count, bytes});
  std::uint8_t* to = out.mutable_data();
  py::gil_scoped_release unlocked;
  for (std::size_t row = 0; row < count; ++row) matrix.store_row(row, to + row * bytes);
  return out;
}

std::vector<std::string> decoder_variants() {
  std::vector<std::string> names;
  for (const decoder::Variant& variant : decoder::variants()) names.emplace_back(variant.name);
  return names;
}

}  // namespace

void bind_decoder(py::module_& module) {
  module.attr("DECODER_PAGE") = decoder::kPage;
  module.def("decoder_variants", &decoder_variants, "Return the instruction sets that this processor supports.");
  module.def("weight_codings", &weight_codings, "Return the forms of rows in files, with the size of a unit.");
  module.def("decode_rows", &decode_rows, py::arg("coding"), py::arg("rows"), py::arg("width"),
             "Return the weights of rows in a form of files.");
  module.def("encode_rows", &encode_rows, py::arg("coding"), py::arg("rows"), py::kw_only(), py::arg("threads"),
             "Return rows in our own form, as a stage would round them.");
  py::class_<Stage>(module, "DecoderStage", "Consecutive layers of a decoder, with their cache.")
      .def(py::init<py::ssize_t, py::ssize_t, py::ssize_t, py::ssize_t, py::ssize_t, const std::string&,
                    const std::string&, bool, float, const std::string&, bool, const std::string&, float, float, float,
                    const std::vector<Rotation>&, py::ssize_t, float, const std::vector<BlockShape>&, py::ssize_t,
                    py::ssize_t, py::ssize_t, py::ssize_t>(),
           py::kw_only(), py::arg("hidden"), py::arg("heads"), py::arg("kv_heads"), py::arg("head_size"),
           py::arg("inner"), py::arg("weights"), py::arg("stream"), py::arg("norm_centred"), py::arg("eps"),
           py::arg("head_norm"), py::arg("gated"), py::arg("activation"), py::arg("scale"), py::arg("score_cap"),
           py::arg("residual_scale"), py::arg("rotations"), py::arg("temper_from"), py::arg("temper"),
           py::arg("blocks"), py::arg("first"), py::arg("end"), py::arg("pages"), py::arg("window_pages"))
      .def("fill", &Stage::fill, py::arg("block"), py::arg("name"), py::arg("first"), py::arg("values"), py::kw_only(),
           py::arg("threads") = 1, py::arg("coding") = py::none())
      .def("widen", &Stage::widen, py::arg("block"), py::arg("name"),
           "Hold a matrix of a stage of int4 in int8; call this before it is filled.")
      .def("step", &Stage::step, py::arg("sequences"), py::arg("inputs"), py::arg("outputs"), py::kw_only(),
           py::arg("threads"), py::arg("variant") = py::none(), py::arg("seconds") = py::none(),
           py::arg("processor_time") = false, py::arg("layers") = -1)
      .def("adopt", &Stage::adopt, py::arg("layer"), py::arg("other"), py::arg("others_layer"),
           "Use a layer of another stage, weights and cache, in place of an own one.")
      .def("read_page", &Stage::read_page, py::arg("first"), py::arg("blocks"), py::arg("page"), py::arg("values"),
           "Copy the keys and values of a page of some blocks.")
      .def("write_page", &Stage::write_page, py::arg("first"), py::arg("blocks"), py::arg("page"), py::arg("values"),
           "Replace the keys and values of a page of some blocks.")
      .def("clear_cache", &Stage::clear_cache, "Set all keys and values to 0.")
      .def_property_readonly("cache_bytes", &Stage::cache_bytes)
      .def_property_readonly("page_bytes", &Stage::page_bytes)
      .def_property_readonly("weight_bytes", &Stage::weight_bytes);
  py::class_<Head>(module, "DecoderHead", "Last norm and head of a decoder.")
      .def(py::init<const std::string&, const std::string&, py::ssize_t, py::ssize_t, bool, float, float, float>(),
           py::kw_only(), py::arg("weights"), py::arg("stream"), py::arg("hidden"), py::arg("tokens"),
           py::arg("norm_centred"), py::arg("eps"), py::arg("scale"), py::arg("cap"))
      .def("fill", &Head::fill, py::arg("name"), py::arg("first"), py::arg("values"), py::kw_only(),
           py::arg("threads") = 1, py::arg("coding") = py::none())
      .def("score", &Head::score, py::arg("hidden"), py::arg("scores"), py::kw_only(), py::arg("threads"),
           py::arg("variant") = py::none())
      .def_property_readonly("weight_bytes", &Head::weight_bytes);
}
