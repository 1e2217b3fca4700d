// The Problem that the scheduler's files describe together, for one request.
#pragma once

#include <array>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "../core/problem.hpp"
#include "specs.hpp"

namespace pipeedge::yaml {

// Transports of links, as profiles name them.
constexpr std::array<std::string_view, 4> kTransports{"p2p", "rpc", "tcp", "tcp-tls"};

// A request for a schedule.
struct Request {
  std::string model = "google/vit-base-patch16-224";
  double batch_size = 8;
  std::string dtype = "torch.float32";
  std::map<std::string, std::string> dtype_of;  // device type -> dtype; if not empty, other types are not used
  double buffers_in = 2;
  double buffers_out = 2;
  std::string data_host;               // empty: links from and to the data rank do not count
  double tokens = 0;                   // of the longest sentence; 0: as profiled
  std::string transport = "p2p";       // of the links: one of kTransports
  double input_bytes = -1;             // of one item of input; negative: according to models.yml and the dtype
  std::vector<std::string> hosts;      // hosts to schedule on, from the devices file; empty: all
  bool names_unprofiled = true;        // warn about device types without a profile for the request
};

// A host that cannot be used, with the reason.
struct LeftOut {
  std::string host;
  std::string type;
  std::string why;
};

// Details of a device type besides its costs.
struct TypeNotes {
  std::string dtype;                   // without "torch."; empty on a data host without a profile
  double threads = 0;                  // number of threads it was profiled with; 0: unknown
  std::string kernels;                 // kernels it was profiled with; empty: unknown
  std::vector<double> tokens;          // sentence lengths it was profiled with, shortest first
  // For joint plans: part of the answers that each layer changes in this dtype, infinite if unknown; empty: none.
  std::vector<double> loss;
};

struct Assembly {
  Problem problem;                     // passes validate()
  std::vector<TypeNotes> notes;        // for each of problem.types
  std::vector<LeftOut> left_out;
  std::vector<std::string> warnings;   // one line each
};

// The model of this name, or with another spelling of its directory; null if there is none.
const ModelSpec* find_model(const Models& models, const std::string& name);
// The profiles of a model on a device type; null if there are none.
const std::vector<Profile>* find_profiles(const TypeSpec& type, const std::string& model);

// Throws SpecError if the files do not contain what the request needs.
Assembly assemble(const Models& models, const DeviceTypes& types, const Devices& devices,
                  const Neighbors* neighbors, const Request& request);

}  // namespace pipeedge::yaml
