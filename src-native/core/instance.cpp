#include "instance.hpp"

#include <cmath>
#include <map>
#include <tuple>
#include <utility>

namespace pipeedge {
namespace {

constexpr int kComparedSenders = 64;

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
    double share = kInfinity;  // of the stages that begin here and end after the layer
    for (int last = layers; last > first; --last) {
      share = std::min(share, type.bid(first, last) / (last - first));
      double& least = shares[static_cast<std::size_t>(last - 1)];
      least = std::min(least, share);
    }
  }
  return shares;
}

bool any_loss(const std::vector<double>& losses) {
  return std::any_of(losses.begin(), losses.end(), [](double loss) { return loss > 0; });
}

}  // namespace

Instance::Instance(const Problem& problem, const LinkTable& links, double batch_size)
    : problem_(problem), batch_size_(batch_size), data_(data_host_of(problem, batch_size)) {
  std::map<double, int> levels;
  for (std::size_t s = 0; s < problem.settings.size(); ++s) {
    if (problem.settings[s].batch_size != batch_size) continue;
    waiting_ = problem.settings[s].waiting;
    levels.emplace(problem.settings[s].element_bytes, settings());
    settings_.push_back(static_cast<int>(s));
    for (int cut = 0; cut <= layers(); ++cut) bytes_.push_back(cut_bytes(problem, problem.settings[s], cut));
  }
  for (const auto& [bytes, local] : levels) local_at_.push_back(local);
  measure_buffers();
  classify(links);
  add_modes(links);
  add_asides(links);
  add_loads();
  measure_links(links);
  bound_layers();
  compare_senders();
}

void Instance::classify(const LinkTable& links) {
  // Hosts with an entry that differs from their device types; all others with the same types are equivalent.
  std::vector<char> has_entry(problem_.hosts.size(), 0);
  for (const Link& link : problem_.links) {
    const LinkSpeed by_type = links.speed_by_type(link.from, link.to);
    if (links.speed(link.from, link.to) == by_type && links.speed(link.to, link.from) == by_type) continue;
    has_entry[index(link.from)] = has_entry[index(link.to)] = 1;
    pairwise_ = true;
  }
  std::vector<int> linked;
  for (int h = 0; h < problem_.host_count(); ++h) {
    if (has_entry[index(h)] != 0) linked.push_back(h);
  }
  std::map<std::tuple<std::vector<int>, bool, bool>, std::vector<int>> candidates;
  std::map<double, int> group_of_bandwidth;
  for (int h = 0; h < problem_.host_count(); ++h) {
    const bool by_table = has_entry[index(h)] != 0;
    std::vector<int> types;
    for (const int s : settings_) types.push_back(problem_.setting(s).type_of[index(h)]);
    for (const Aside& aside : problem_.asides) {
      for (const Setting& setting : aside.settings) types.push_back(setting.type_of[index(h)]);
    }
    auto& same = candidates[{std::move(types), h == problem_.data_host, by_table}];
    const auto found = std::find_if(same.begin(), same.end(), [&](int cls) {
      return !by_table || alike(links, hosts_[index(cls)].front(), h, linked);
    });
    class_of_.push_back(found != same.end() ? *found : classes());
    if (found != same.end()) {
      hosts_[index(*found)].push_back(h);
      members_[index(group_[index(*found)])].push_back(h);
      continue;
    }
    int group = groups();
    if (!by_table) group = group_of_bandwidth.emplace(links.bandwidth(h), group).first->second;
    if (group == groups()) members_.emplace_back();
    members_[index(group)].push_back(h);
    group_.push_back(group);
    if (h == problem_.data_host) data_class_ = classes();
    same.push_back(classes());
    hosts_.push_back({h});
  }
}

void Instance::add_modes(const LinkTable& links) {
  const int data = problem_.data_host;
  for (int cls = 0; cls < classes(); ++cls) {
    const int host = hosts(cls).front();
    first_mode_.push_back(-1);
    for (int local = 0; local < settings(); ++local) {
      const int s = settings_[index(local)];
      const Setting& setting = problem_.setting(s);
      const DeviceType* const type = setting.type(host);
      if (type == nullptr) continue;
      const auto level = std::find_if(local_at_.begin(), local_at_.end(), [&](int other) {
        return problem_.setting(settings_[index(other)]).element_bytes == setting.element_bytes;
      });
      if (first_mode_.back() < 0) first_mode_.back() = static_cast<int>(modes_.size());
      modes_.push_back({cls, s, local, static_cast<int>(level - local_at_.begin()), group_[index(cls)], type});
      loses_ = loses_ || any_loss(type->loss);
      memory_.push_back(loosened(type->mem_bytes));
      double through = 0;
      for (int cut = 0; cut <= layers(); ++cut) {
        receive_.push_back(receive_seconds(problem_, *type, host, cut));
        send_.push_back(send_seconds(problem_, *type, host, cut));
        through_.push_back(through);
        if (cut < layers()) through += type->time_s[index(cut)];
        handles_ = handles_ || receive_.back() > 0;
      }
      from_data_.push_back(data == -1 ? 0 : links.seconds(data, host, mean_bytes(problem_, setting, 0)));
      to_data_.push_back(data == -1 ? 0 : links.seconds(host, data, mean_bytes(problem_, setting, layers())));
    }
  }
}

void Instance::add_asides(const LinkTable& links) {
  const int data = problem_.data_host;
  for (const Aside& aside : problem_.asides) {
    AsideTimes times;
    times.data = data_host_of(problem_, aside);
    times.bytes = aside.settings.front().batch_size / batch_size_;
    for (const Mode& mode : modes_) {
      const int host = hosts(mode.cls).front();
      const Setting& setting = *aside.setting(problem_.setting(mode.setting).dtype);
      const DeviceType* const type = setting.type(host);
      double through = 0;
      for (int cut = 0; cut <= layers(); ++cut) {
        times.receive.push_back(type == nullptr ? kInfinity : receive_seconds(problem_, *type, host, cut));
        times.send.push_back(type == nullptr ? kInfinity : send_seconds(problem_, *type, host, cut));
        times.through.push_back(through);
        if (cut < layers() && type != nullptr) through += type->time_s[index(cut)];
      }
      times.from_data.push_back(data == -1 ? 0 : links.seconds(data, host, mean_bytes(problem_, setting, 0)));
      times.to_data.push_back(data == -1 ? 0 : links.seconds(host, data, mean_bytes(problem_, setting, layers())));
    }
    asides_.push_back(std::move(times));
  }
}

Instance::AsideStage Instance::aside_stage(int aside, int mode, int first, int last) const {
  const AsideTimes& times = asides_[index(aside)];
  const bool away = this->mode(mode).cls != data_class_;
  AsideStage found;
  found.latency_s = times.receive[row(mode) + index(first)] +
                    (times.through[row(mode) + index(last)] - times.through[row(mode) + index(first)]) +
                    times.send[row(mode) + index(last)];
  found.longest_s = found.latency_s + (away ? 0 : times.data.total_s(first > 0, last < layers()));
  const auto takes = [&](double seconds) {
    found.latency_s += seconds;
    found.longest_s = std::max(found.longest_s, seconds);
  };
  if (first == 0) {
    takes(times.data.feeding_s(away));
    takes(times.from_data[index(mode)]);
  }
  if (last == layers()) {
    takes(times.to_data[index(mode)]);
    takes(times.data.collecting_s(away));
  }
  return found;
}

void Instance::add_loads() {
  for (int level = 0; level < levels(); ++level) {
    const Setting& setting = problem_.setting(settings_[index(local_at_[index(level)])]);
    for (int cut = 0; cut <= layers(); ++cut) {
      load_start_.push_back(loads_.size());
      std::vector<Load> all;
      for (std::size_t w = 0; w < problem_.widths.size() && cut > 0 && cut < layers(); ++w) {
        const Width& width = problem_.widths[w];
        const double loss = width.loss_at(cut);
        if (!useful(setting, width.bits) || std::isinf(loss)) continue;
        all.push_back({link_bytes(problem_, setting, width.bits, cut), loss, static_cast<int>(w)});
        loses_ = loses_ || loss > 0;
      }
      std::stable_sort(all.begin(), all.end(), [](const Load& a, const Load& b) {
        return std::tie(a.loss, a.bytes) < std::tie(b.loss, b.bytes);
      });
      double least = kInfinity;
      for (const Load& load : all) {
        if (!(load.bytes < least)) continue;
        loads_.push_back(load);
        least = load.bytes;
      }
      least_bytes_.push_back(least);
    }
  }
  load_start_.push_back(loads_.size());
}

void Instance::measure_links(const LinkTable& links) {
  const LinkSpeed none{0, kInfinity};
  speeds_.assign(index(groups()) * index(groups()), none);
  best_in_.assign(index(groups()), none);
  best_out_.assign(index(groups()), none);
  for (int from = 0; from < groups(); ++from) {
    for (int to = 0; to < groups(); ++to) {
      const std::vector<int>& members = members_[index(to)];
      if (from == to && members.size() < 2) continue;
      const LinkSpeed speed = links.speed(members_[index(from)].front(), from == to ? members[1] : members.front());
      speeds_[index(from) * index(groups()) + index(to)] = speed;
      best_out_[index(from)] = better_of_each(best_out_[index(from)], speed);
      best_in_[index(to)] = better_of_each(best_in_[index(to)], speed);
    }
  }
  // Without a table, each end bounds the link by its own bandwidth, whatever partners there are.
  for (int group = 0; group < groups() && !pairwise_; ++group) {
    best_in_[index(group)] = best_out_[index(group)] = {links.bandwidth(members_[index(group)].front()), 0};
  }
}

void Instance::bound_layers() {
  std::vector<double> least(index(layers()), kInfinity);
  for (int m = 0; m < static_cast<int>(modes_.size()); ++m) {
    const Mode& mode = this->mode(m);
    const std::vector<double> times = mode.type->bids() ? layer_shares(*mode.type, layers()) : mode.type->time_s;
    for (std::size_t l = 0; l < least.size(); ++l) least[l] = std::min(least[l], times[l]);
    nested_ = nested_ && nests(m);
  }
  fastest_.push_back(0);
  for (const double seconds : least) {
    fastest_.push_back(fastest_.back() + seconds);
    longest_layer_ = std::max(longest_layer_, seconds);
  }
}

double Instance::least_period() const {
  const double place_s = std::max(data_.floor_s(), longest_layer_) * waiting_;
  if (!problem().returns()) return place_s;
  // As many microbatches as are under way come through all places meanwhile.
  const double round_s = data_.feed_s + fastest(0, layers()) + data_.collect_s;
  return std::max(place_s, round_s * batch_size() / problem().most_items);
}

void Instance::compare_senders() {
  if (senders() > kComparedSenders) return;
  const auto faster = [&](int group, int other, int to) {
    const LinkSpeed speed = this->speed(group, to);
    const LinkSpeed than = this->speed(other, to);
    // A single host that has been used is no receiver for either.
    const bool receives = std::isfinite(speed.latency_s) && std::isfinite(than.latency_s);
    return !receives || (speed.bw_bytes_per_s >= than.bw_bytes_per_s && speed.latency_s <= than.latency_s);
  };
  // A smaller element size is only as good if it can do without the widths that are of use to the larger one.
  const bool uncompressed = std::any_of(problem_.widths.begin(), problem_.widths.end(),
                                        [](const Width& width) { return width.bits == 0 && !any_loss(width.loss); });
  as_good_.assign(index(senders()) * index(senders()), 0);
  for (int one = 0; one < senders(); ++one) {
    for (int other = 0; other < senders(); ++other) {
      const int level = one % levels();
      bool good = uncompressed ? level <= other % levels() : level == other % levels();
      for (int to = 0; to < groups() && good; ++to) good = faster(one / levels(), other / levels(), to);
      as_good_[index(one) * index(senders()) + index(other)] = good ? 1 : 0;
    }
  }
}

void Instance::measure_buffers() {
  for (int local = 0; local < settings(); ++local) {
    const Setting& setting = problem_.setting(settings_[index(local)]);
    for (int level = 0; level < levels(); ++level) {
      for (int cut = 0; cut <= layers(); ++cut) {
        buffer_in_.push_back(setting.buffers_in * bytes(cut == 0 ? local : local_at_[index(level)], cut));
      }
    }
    for (int cut = 0; cut <= layers(); ++cut) buffer_out_.push_back(setting.buffers_out * bytes(local, cut));
  }
}

bool Instance::dearer(int later, int cut) const {
  const double buffers = problem_.setting(settings_.front()).buffers_in;
  if (least_bytes(0, later) > least_bytes(0, cut) || buffers * bytes(0, later) > buffers * bytes(0, cut)) return true;
  for (int m = 0; m < static_cast<int>(modes_.size()) && handles_; ++m) {
    const double saved = through_[row(m) + index(later)] - through_[row(m) + index(cut)];
    if (receive(m, later) > receive(m, cut) + saved) return true;
  }
  return false;
}

// Whether a host takes each part of its stages after a cut that is not dearer, too. Others than these do.
bool Instance::nests(int mode) const {
  const DeviceType& type = *this->mode(mode).type;
  if (!type.bids() && type.beside_bytes.empty()) return true;
  if (settings() > 1) return false;
  std::vector<double> costs((index(layers()) + 1) * (index(layers()) + 1), kInfinity);  // of the stages that it takes
  for (int first = 1; first < layers(); ++first) {
    GrowingStage stage = stage_from(mode, first);
    while (stage.last() < layers()) {
      stage.add_layer();
      if (room(mode, stage) < 0) continue;
      costs[type.stage_index(first, stage.last())] = type.bids() ? type.bid(first, stage.last()) : 0;
    }
  }
  for (int first = 1; first < layers(); ++first) {
    for (int before = 1; before < first; ++before) {
      if (dearer(first, before)) continue;
      for (int last = first + 1; last <= layers(); ++last) {
        if (costs[type.stage_index(first, last)] > loosened(costs[type.stage_index(before, last)])) return false;
      }
    }
  }
  return true;
}

double Instance::link_in(int mode, int cut) const {
  const Mode& own = this->mode(mode);
  if (cut == 0) return std::max(from_data_[index(mode)], data_.feeding_s(own.cls != data_class_));
  double bytes = kInfinity;
  for (int level = 0; level < levels(); ++level) bytes = std::min(bytes, least_bytes(level, cut));
  const LinkSpeed& best = best_in_[index(own.group)];
  return link_seconds(bytes, best.bw_bytes_per_s, best.latency_s);
}

double Instance::link_out(int mode, int cut) const {
  const Mode& own = this->mode(mode);
  if (cut == layers()) return std::max(to_data_[index(mode)], data_.collecting_s(own.cls != data_class_));
  const LinkSpeed& best = best_out_[index(own.group)];
  return link_seconds(least_bytes(own.level, cut), best.bw_bytes_per_s, best.latency_s);
}

std::vector<double> Instance::periods_between(double low, double high) const {
  std::vector<double> values;
  const auto note = [&](double seconds) {
    const double value = seconds * waiting_;
    if (value >= low && loosened(value) < high) values.push_back(value);
  };
  for (int m = 0; m < static_cast<int>(modes_.size()); ++m) {
    for (int first = 0; first < layers(); ++first) {
      GrowingStage stage = stage_from(m, first);
      while (stage.last() < layers()) {
        stage.add_layer();
        if (!(stage.layers_s() * waiting_ < high) || overfull(m, stage)) break;
        if (room(m, stage) >= 0) note(busy_seconds(m, stage));
      }
      note(link_in(m, first));
      note(link_out(m, first + 1));
    }
  }
  if (!pairwise_ && levels() == 1 && problem_.widths.size() == 1) return values;
  for (int level = 0; level < levels(); ++level) {
    for (int cut = 1; cut < layers(); ++cut) {
      for (const LinkSpeed& speed : speeds_) {
        for (const Load* load = loads_begin(level, cut); load != loads_end(level, cut); ++load) {
          note(link_seconds(load->bytes, speed.bw_bytes_per_s, speed.latency_s));
        }
      }
    }
  }
  return values;
}

}  // namespace pipeedge
