package kube_test

import (
	"context"
	"fmt"
	"reflect"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/trivet-csi/trivet/cluster/kube"
)

const (
	namespace     = "trivet-system"
	nodesPath     = "/api/v1/nodes/"
	endpointsPath = "/apis/discovery.k8s.io/v1/namespaces/" + namespace + "/endpointslices/"
)

// updates are the lists of hosts that update received.
type updates struct {
	mu  sync.Mutex
	all [][]kube.Host
}

func (u *updates) add(hosts []kube.Host) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.all = append(u.all, hosts)
}

// expect waits until all goroutines wait, and fails the test unless the last of n updates is want.
func (u *updates) expect(t *testing.T, what string, n int, want ...kube.Host) {
	t.Helper()
	synctest.Wait()
	u.mu.Lock()
	defer u.mu.Unlock()
	if len(u.all) != n || n > 0 && !slices.Equal(u.all[n-1], want) {
		t.Errorf("%s: after %d updates %v, want after %d %v", what, len(u.all), u.all, n, want)
	}
}

func watchHosts(t *testing.T, c *cluster) (*updates, *logBuffer) {
	t.Helper()
	u := &updates{}
	log, _ := start(t, func(ctx context.Context) {
		kube.WatchHosts(ctx, user{cluster: c}.connect, namespace, "trivet-node", u.add)
	})
	return u, log
}

func node(labels object) object { return object{"metadata": object{"labels": labels}} }

var registered = object{"csi.trivet.dev/node": "any"}

// slice is an EndpointSlice of the drivers.
func slice(endpoints ...object) object {
	return object{
		"metadata":  object{"labels": object{"kubernetes.io/service-name": "trivet-node"}},
		"endpoints": endpoints, "ports": []any{object{"name": "metrics", "port": 1}, object{"name": "forwarding", "port": 9811}},
	}
}

func on(node, address string, conditions object) object {
	return object{"nodeName": node, "addresses": []any{address}, "conditions": conditions}
}

var (
	ready  = object{"ready": true}
	broken = object{"ready": false}
	ending = object{"ready": true, "terminating": true}
)

func TestHosts(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		c.put(nodesPath+"was", node(registered))
		c.put(nodesPath+"is", node(nil))
		c.put(nodesPath+"never", node(nil))
		c.put(endpointsPath+"one", slice(on("is", "10.0.0.1", broken), on("deleted", "10.0.0.9", ready)))
		c.put(endpointsPath+"other", object{"metadata": object{"labels": object{"kubernetes.io/service-name": "other"}}, "endpoints": []object{on("never", "10.0.0.8", ready)}})
		u, _ := watchHosts(t, c)
		is, was := kube.Host{Name: "is", Address: "10.0.0.1:9811"}, kube.Host{Name: "was"}
		u.expect(t, "at first", 1, is, was)

		c.put(nodesPath+"is", node(object{"news": "none"}))
		c.put(endpointsPath+"one", slice(on("is", "10.0.0.1", ready)))
		u.expect(t, "irrelevant changes", 1, is, was)

		c.put(endpointsPath+"two", slice(on("was", "fd00::2", ready)))
		was.Address = "[fd00::2]:9811"
		u.expect(t, "a driver starts", 2, is, was)

		c.put(endpointsPath+"one", slice(on("is", "10.0.0.1", ending), on("is", "10.0.0.3", broken)))
		is.Address = "10.0.0.3:9811"
		u.expect(t, "another pod replaces the first", 3, is, was)

		c.put(nodesPath+"never", node(registered))
		u.expect(t, "a node registers", 4, is, kube.Host{Name: "never"}, was)

		c.remove(nodesPath + "is")
		c.remove(nodesPath + "never")
		synctest.Wait()
		u.mu.Lock()
		n := len(u.all)
		u.mu.Unlock()
		u.expect(t, "nodes are deleted", n, was)

		c.remove(endpointsPath + "two")
		was.Address = ""
		u.expect(t, "its driver ends", n+1, was)
	})
}

// TestHostsOfManyEndpoints: the choice between two endpoints of a node does not depend on their order.
func TestHostsOfManyEndpoints(t *testing.T) {
	noAddress := object{"nodeName": "n", "addresses": []any{}, "conditions": ready}
	for name, tc := range map[string]struct {
		endpoints []object
		want      string
	}{
		"ready before not ready":   {[]object{on("n", "10.0.0.1", broken), on("n", "10.0.0.2", ready)}, "10.0.0.2:9811"},
		"not ready before ending":  {[]object{on("n", "10.0.0.1", ending), on("n", "10.0.0.2", broken)}, "10.0.0.2:9811"},
		"ending before no address": {[]object{noAddress, on("n", "10.0.0.2", ending)}, "10.0.0.2:9811"},
		"two alike":                {[]object{on("n", "10.0.0.2", ready), on("n", "10.0.0.1", ready)}, "10.0.0.1:9811"},
		"no node":                  {[]object{{"addresses": []any{"10.0.0.1"}, "conditions": ready}, on("n", "10.0.0.2", ready)}, "10.0.0.2:9811"},
		"no address":               {[]object{noAddress}, ""},
		"replaced at one address":  {[]object{on("n", "10.0.0.1", ending), on("n", "10.0.0.1", ready)}, "10.0.0.1:9811"},
	} {
		for _, reversed := range []bool{false, true} {
			t.Run(fmt.Sprint(name, reversed), func(t *testing.T) {
				bubble(t, func(t *testing.T, c *cluster) {
					all := slices.Clone(tc.endpoints)
					if reversed {
						slices.Reverse(all)
					}
					c.put(nodesPath+"n", node(registered))
					for i, e := range all {
						c.put(fmt.Sprint(endpointsPath, i), slice(e))
					}
					u, _ := watchHosts(t, c)
					u.expect(t, name, 1, kube.Host{Name: "n", Address: tc.want})
				})
			})
		}
	}
}

func TestNoHosts(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		u, _ := watchHosts(t, c)
		u.expect(t, "an empty cluster", 1)
	})
}

// TestHostsWaitForAll: no hosts are reported before both Nodes and EndpointSlices are read. Otherwise hosts
// would appear to have no driver.
func TestHostsWaitForAll(t *testing.T) {
	for _, hidden := range []string{"nodes", "endpointslices"} {
		bubble(t, func(t *testing.T, c *cluster) {
			c.put(nodesPath+"n", node(registered))
			c.put(endpointsPath+"one", slice(on("n", "10.0.0.1", ready)))
			c.fail["WATCH "+hidden] = slices.Repeat([]int{403}, 20)
			c.fail["GET "+hidden] = slices.Repeat([]int{403}, 20)
			u, log := watchHosts(t, c)
			u.expect(t, "no "+hidden, 0)
			time.Sleep(time.Hour)
			u.expect(t, hidden, 1, kube.Host{Name: "n", Address: "10.0.0.1:9811"})
			if log.count("retrying") != 1 {
				t.Errorf("want one line about %s:\n%s", hidden, log)
			}
		})
	}
}

// TestHostsWithoutAPIServer: the hosts do not change while the API server does not answer, and are updated
// when it answers again.
func TestHostsWithoutAPIServer(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		c.put(nodesPath+"n", node(registered))
		u, log := watchHosts(t, c)
		u.expect(t, "at first", 1, kube.Host{Name: "n"})
		c.setUnreachable(true)
		time.Sleep(time.Hour)
		c.put(endpointsPath+"one", slice(on("n", "10.0.0.1", ready)))
		c.put(nodesPath+"m", node(registered))
		u.expect(t, "away", 1, kube.Host{Name: "n"})
		c.setUnreachable(false)
		time.Sleep(time.Hour)
		u.mu.Lock()
		last := u.all[len(u.all)-1]
		u.mu.Unlock()
		if want := []kube.Host{{Name: "m"}, {Name: "n", Address: "10.0.0.1:9811"}}; !reflect.DeepEqual(last, want) {
			t.Errorf("after the outage: %v, want %v", last, want)
		}
		if n := log.count("connection refused"); n != 2 {
			t.Errorf("%d lines, want one per watch:\n%s", n, log)
		}
	})
}

// TestHostsNoConnection: without a connection, WatchHosts ends when its context does.
func TestHostsNoConnection(t *testing.T) {
	bubble(t, func(t *testing.T, _ *cluster) {
		u := &updates{}
		log, stop := start(t, func(ctx context.Context) { kube.WatchHosts(ctx, kube.InCluster, "", "", u.add) })
		time.Sleep(time.Hour)
		stop()
		if u.expect(t, "no connection", 0); log.count("Connecting to the API server failed") != 1 {
			t.Errorf("want one line:\n%s", log)
		}
	})
}
