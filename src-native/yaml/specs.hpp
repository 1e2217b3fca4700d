// The scheduler's YAML files as plain data. Every program of PipeEdge reads them through these functions.
//
//   models.yml            model -> layers, mem_MB, parameters_in, parameters_out; for text optionally tokens,
//                                  parameters_in_per_token, parameters_out_per_token; optionally shared_with,
//                                  agreement_at_bits: bits -> [of each cut]; for decoders context, optionally windows
//   device_types.yml      type  -> bw_Mbps, mem_MB, model_profiles: model -> [batch_size, dtype, time_s,
//                                  spread_s, receive_s, send_s, activations_MB, weights_MB, feed_s, collect_s, overhead_s,
//                                  agreement, process_MB, busy_W, threads, kernels, handling: transport -> receive_s,
//                                  receive_s_per_MB, send_s, send_s_per_MB]   (optional from spread_s on); for
//                                  text optionally tokens, and lengths: [tokens, time_s, ...] for other lengths; for
//                                  decoders steps: fixed_s, start_s, row_s, position_s, chunk_position_s, cache_bytes,
//                                  optionally many_start_s, many_row_s and variation, and
//                                  ends: fixed_s, start_s, row_s, feed_s, feed_row_s, mem_MB
//                         type  -> busy_W, idle_W                        (optional)
//   devices.yml           type  -> [host]
//   device_neighbors.yml  host  -> neighbour -> bw_Mbps, latency_s           (optional)
//   CLUSTER.yml           device_types, devices: the contents of such a file, or its name
//
// A file is always checked completely, whatever is used of it. Keys that no field stands for are kept as they
// are, because files may contain more than is read here. Only this file converts units.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "../core/problem.hpp"
#include "tree.hpp"

namespace pipeedge::yaml {

constexpr double kBytesPerMB = 1 << 20;                     // mem_MB counts 2^20 bytes
constexpr double kBytesPerSecondPerMbps = (1 << 20) / 8.0;  // bw_Mbps counts 2^20 bits per second

// Entries of a map that no field stands for, in file order.
using OtherKeys = std::vector<std::pair<std::string, View>>;

struct ModelSpec {
  std::string name;
  int line = 0;
  Model model;  // model.layers() may be 0
  // For text, if given: the sentence length of the sizes, and how they grow with it.
  double tokens = 0;  // 0: unknown
  double elements_in_per_token = 0;
  std::vector<double> elements_out_per_token;
  // If given: for bits per value, the part of the answers that stay the same if the cut after each layer but the
  // last sends so many.
  std::map<int, std::vector<double>> agreement_at_bits;
  // For decoders: the longest sequence, 0 for encoders, and by layer the positions that a row attends to at most, or 0;
  // empty without windows.
  double context = 0;
  std::vector<double> windows;
  OtherKeys other;
};

// What a transport costs a stage in addition to Profile::receive_s and send_s.
struct Handling {
  double receive_s = 0;  // of a microbatch
  double receive_s_per_byte = 0;
  double send_s = 0;
  double send_s_per_byte = 0;
  OtherKeys other;
};

// What the steps of a decoder cost: of a layer max(fixed_s, start_s + rows * row_s), where many rows take at most
// many_start_s + rows * many_row_s in place of that line, and for each position that a row attends to position_s, or
// chunk_position_s where the rows are of one sequence. One number for each layer.
struct StepCosts {
  std::vector<double> fixed_s, start_s, row_s, position_s, chunk_position_s;
  std::vector<double> many_start_s, many_row_s;  // both empty: as start_s and row_s
  std::vector<double> cache_bytes;  // for each position of a sequence
  // Of the ends, on the data rank: max(fixed_s, start_s + rows * row_s) for the rows that decide a token, and
  // feed_s + texts * feed_row_s for making a step of rows of so many texts.
  struct Ends {
    double fixed_s = 0, start_s = 0, row_s = 0, feed_s = 0, feed_row_s = 0;
    double mem_bytes = 0;
  } ends;
  std::optional<double> residual;         // largest relative deviation of a measured step
  std::optional<double> variation;        // standard deviation of a step's time, as a part of the mean
  std::optional<double> load_s_per_byte;  // of weights, from a file that was read before
};

struct Profile {
  double batch_size = 0;
  std::string dtype;  // as written, with or without "torch."
  int line = 0;       // line of time_s
  std::vector<double> time_s;
  // Empty if the profile does not have them:
  std::vector<double> spread_s;  // between the quartiles of the measured times
  std::vector<double> receive_s;
  std::vector<double> send_s;
  std::vector<double> activation_bytes;
  std::vector<double> weight_bytes;
  std::optional<double> feed_s;
  std::optional<double> collect_s;
  std::optional<double> overhead_s;
  std::optional<double> agreement;           // part of the classifications that are those of float32
  std::optional<double> process_bytes;       // memory of the process besides its stage
  std::optional<double> busy_w;              // watts while it was measured
  double threads = 0;                        // 0: unknown
  std::string kernels;                       // with which it was profiled; empty: unknown
  double tokens = 0;                         // sentence length; 0 if unknown or not text
  std::map<std::string, Handling> handling;  // by transport; empty if the profile does not have it
  std::optional<StepCosts> steps;            // of a decoder
  std::vector<Profile> lengths;              // profiles of other lengths, with the lists and `tokens` only
  OtherKeys other;
};

struct ModelProfiles {
  std::string model;
  std::vector<Profile> profiles;
};

struct TypeSpec {
  std::string name;
  double bw_bytes_per_s = 0;
  double mem_bytes = 0;
  std::optional<double> busy_w;  // watts while it computes, for profiles without their own
  std::optional<double> idle_w;  // watts while it waits
  std::vector<ModelProfiles> models;
  OtherKeys other;
};

struct TypeHosts {
  std::string type;
  std::vector<std::string> hosts;
};

struct NeighborSpec {
  std::string to;
  double bw_bytes_per_s = 0;
  double latency_s = 0;
  OtherKeys other;
};

struct HostNeighbors {
  std::string from;
  std::vector<NeighborSpec> links;
};

// With the name of the file, for messages that compare two files, and its contents, to which OtherKeys refer.
template <typename T>
struct SpecFile {
  std::shared_ptr<const Document> document;
  std::vector<T> entries;

  const std::string& name() const { return document->name(); }
};
using Models = SpecFile<ModelSpec>;
using DeviceTypes = SpecFile<TypeSpec>;
using Devices = SpecFile<TypeHosts>;
using Neighbors = SpecFile<HostNeighbors>;

struct Cluster {
  DeviceTypes types;
  Devices devices;
};

// All of these throw SpecError.
Models models_from(Document document);
DeviceTypes device_types_from(Document document);
Devices devices_from(Document document);
Neighbors neighbors_from(Document document);

// Reads a test bed's file, and the files that it names.
Cluster read_cluster(const std::string& file);

// Returns the short name of a dtype, without "torch.".
std::string_view short_dtype(std::string_view dtype);

}  // namespace pipeedge::yaml
