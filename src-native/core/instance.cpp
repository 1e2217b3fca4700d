#include "instance.hpp"

#include <algorithm>
#include <map>
#include <tuple>

namespace pipeedge {
namespace {

LinkSpeed better_of_each(const LinkSpeed& a, const LinkSpeed& b) {
  return {std::max(a.bw_bytes_per_s, b.bw_bytes_per_s), std::min(a.latency_s, b.latency_s)};
}

bool alike(const LinkTable& links, int a, int b, const std::vector<int>& linked) {
  if (!(links.speed(a, b) == links.speed(b, a))) return false;
  return std::all_of(linked.begin(), linked.end(), [&](int other) {
    return other == a || other == b ||
           (links.speed(a, other) == links.speed(b, other) && links.speed(other, a) == links.speed(other, b));
  });
}

// Times of layers whose sum never exceeds a bid: for each layer, the smallest time per layer of any stage
// that contains it.
std::vector<double> layer_shares(const DeviceType& type, int layers) {
  std::vector<double> shares(static_cast<std::size_t>(layers), kInfinity);
  for (int first = 0; first < layers; ++first) {
    double share = kInfinity;     // of the stages that begin here and end after the layer
    for (int last = layers; last > first; --last) {
      share = std::min(share, type.bid(first, last) / (last - first));
      double& least = shares[static_cast<std::size_t>(last - 1)];
      least = std::min(least, share);
    }
  }
  return shares;
}

}  // namespace

Instance::Instance(const Problem& problem)
    : problem_(problem), layers_(problem.model.layers()), data_(data_work(problem)) {
  for (int cut = 0; cut <= layers_; ++cut) {
    bytes_.push_back(link_bytes(problem, cut));
    buffer_in_.push_back(problem.buffers_in * cut_bytes(problem, cut));
    buffer_out_.push_back(problem.buffers_out * cut_bytes(problem, cut));
  }
  const LinkTable links(problem);
  classify(links);
  measure_links(links);
  measure_handling();
  least_.assign(index(layers_), kInfinity);
  for (const DeviceType* type : types_) {
    const std::vector<double> times = type->bids() ? layer_shares(*type, layers_) : type->time_s;
    for (int l = 0; l < layers_; ++l) least_[index(l)] = std::min(least_[index(l)], times[index(l)]);
    if (type->bids()) nested_ = nested_ && bids_nested(*type);
  }
  fastest_.push_back(0);
  for (const double seconds : least_) fastest_.push_back(fastest_.back() + seconds);
}

void Instance::classify(const LinkTable& links) {
  // Hosts with an entry that differs from their device types; all others of a type are equivalent.
  std::vector<char> has_entry(problem_.hosts.size(), 0);
  for (const Link& link : problem_.links) {
    const LinkSpeed by_type{
        std::min(links.type_of(link.from).bw_bytes_per_s, links.type_of(link.to).bw_bytes_per_s), 0};
    if (links.speed(link.from, link.to) == by_type && links.speed(link.to, link.from) == by_type) continue;
    has_entry[index(link.from)] = has_entry[index(link.to)] = 1;
    pairwise_ = true;
  }
  std::vector<int> linked;
  for (std::size_t h = 0; h < has_entry.size(); ++h) {
    if (has_entry[h] != 0) linked.push_back(static_cast<int>(h));
  }

  std::map<std::tuple<int, bool, bool>, std::vector<int>> candidates;
  for (std::size_t h = 0; h < problem_.hosts.size(); ++h) {
    const int host = static_cast<int>(h);
    auto& same = candidates[{problem_.hosts[h].type, host == problem_.data_host, has_entry[h] != 0}];
    const auto found = std::find_if(same.begin(), same.end(), [&](int cls) {
      return has_entry[h] == 0 || alike(links, hosts_[index(cls)].front(), host, linked);
    });
    if (found != same.end()) {
      hosts_[index(*found)].push_back(host);
      continue;
    }
    same.push_back(classes());
    hosts_.push_back({host});
    types_.push_back(&links.type_of(host));
    memory_.push_back(loosened(links.type_of(host).mem_bytes));
  }
}

void Instance::measure_links(const LinkTable& links) {
  const int data = problem_.data_host;
  for (int cls = 0; cls < classes(); ++cls) {
    const int host = hosts(cls).front();
    if (data != -1 && host == data) data_class_ = cls;
    from_data_.push_back(data == -1 ? 0 : links.seconds(data, host, bytes(0)));
    to_data_.push_back(data == -1 ? 0 : links.seconds(host, data, bytes(layers_)));
  }
  if (!pairwise_) return;
  const LinkSpeed none{0, kInfinity};
  speeds_.assign(index(classes()) * index(classes()), none);
  best_in_.assign(index(classes()), none);
  best_out_.assign(index(classes()), none);
  for (int from = 0; from < classes(); ++from) {
    for (int to = 0; to < classes(); ++to) {
      const bool within = from == to;
      if (within && count(from) < 2) continue;
      const LinkSpeed speed = links.speed(hosts(from).front(), within ? hosts(to)[1] : hosts(to).front());
      speeds_[index(from) * index(classes()) + index(to)] = speed;
      best_out_[index(from)] = better_of_each(best_out_[index(from)], speed);
      best_in_[index(to)] = better_of_each(best_in_[index(to)], speed);
    }
  }
}

void Instance::measure_handling() {
  for (int cls = 0; cls < classes(); ++cls) {
    const int host = hosts(cls).front();
    double through = 0;
    for (int cut = 0; cut <= layers_; ++cut) {
      receive_.push_back(receive_seconds(problem_, host, cut));
      send_.push_back(send_seconds(problem_, host, cut));
      through_.push_back(through);
      if (cut < layers_) through += type(cls).time_s[index(cut)];
      handles_ = handles_ || receive_.back() > 0;
    }
  }
}

bool Instance::receiving_grows(int later, int cut) const {
  for (int cls = 0; cls < classes(); ++cls) {
    const double saved = through_[row(cls) + index(later)] - through_[row(cls) + index(cut)];
    if (receive(cls, later) > receive(cls, cut) + saved) return true;
  }
  return false;
}

bool Instance::bids_nested(const DeviceType& type) const {
  for (int first = 1; first < layers_; ++first) {
    for (int before = 0; before < first; ++before) {
      if (dearer(first, before)) continue;
      for (int last = first + 1; last <= layers_; ++last) {
        if (type.bid(first, last) > loosened(type.bid(before, last))) return false;
      }
    }
  }
  return true;
}

LinkSpeed Instance::speed(int from_cls, int to_cls) const {
  if (pairwise_) return speeds_[index(from_cls) * index(classes()) + index(to_cls)];
  return {std::min(type(from_cls).bw_bytes_per_s, type(to_cls).bw_bytes_per_s), 0};
}

double Instance::link(int from_cls, int to_cls, int cut) const {
  const LinkSpeed link = speed(from_cls, to_cls);
  return link_seconds(bytes(cut), link.bw_bytes_per_s, link.latency_s);
}

double Instance::link_in(int cls, int cut) const {
  if (cut == 0) return std::max(from_data_[index(cls)], data_.feeding_s(cls != data_class_));
  if (!pairwise_) return link_seconds(bytes(cut), type(cls).bw_bytes_per_s, 0);
  return link_seconds(bytes(cut), best_in_[index(cls)].bw_bytes_per_s, best_in_[index(cls)].latency_s);
}

double Instance::link_out(int cls, int cut) const {
  if (cut == layers_) return std::max(to_data_[index(cls)], data_.collecting_s(cls != data_class_));
  if (!pairwise_) return link_seconds(bytes(cut), type(cls).bw_bytes_per_s, 0);
  return link_seconds(bytes(cut), best_out_[index(cls)].bw_bytes_per_s, best_out_[index(cls)].latency_s);
}

}  // namespace pipeedge
