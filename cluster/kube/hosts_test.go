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

// expect waits until all goroutines are blocked, and fails the test unless there were n updates and the
// last one is want. step describes the situation.
func (u *updates) expect(t *testing.T, step string, n int, want ...kube.Host) {
	t.Helper()
	synctest.Wait()
	u.mu.Lock()
	defer u.mu.Unlock()
	if len(u.all) != n || n > 0 && !slices.Equal(u.all[n-1], want) {
		t.Errorf("%s: got %d updates %v, want %d updates, the last %v", step, len(u.all), u.all, n, want)
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

func nodeObject(labels object) object { return object{"metadata": object{"labels": labels}} }

var registered = object{"csi.trivet.dev/node": "any"}

// sliceOf returns an EndpointSlice of the Service trivet-node.
func sliceOf(endpoints ...object) object {
	return object{
		"metadata":  object{"labels": object{"kubernetes.io/service-name": "trivet-node"}},
		"endpoints": endpoints, "ports": []any{object{"name": "metrics", "port": 1}, object{"name": "forwarding", "port": 9811}},
	}
}

// endpointOn returns an endpoint of an EndpointSlice.
func endpointOn(node, address string, conditions object) object {
	return object{"nodeName": node, "addresses": []any{address}, "conditions": conditions}
}

var (
	ready       = object{"ready": true}
	notReady    = object{"ready": false}
	terminating = object{"ready": true, "terminating": true}
)

// TestHosts: a change of Nodes or EndpointSlices causes an update only if it changes the hosts.
func TestHosts(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		c.put(nodesPath+"stopped", nodeObject(registered))
		c.put(nodesPath+"running", nodeObject(nil))
		c.put(nodesPath+"none", nodeObject(nil))
		c.put(endpointsPath+"one", sliceOf(endpointOn("running", "10.0.0.1", notReady), endpointOn("deleted", "10.0.0.9", ready)))
		c.put(endpointsPath+"other", object{"metadata": object{"labels": object{"kubernetes.io/service-name": "other"}}, "endpoints": []object{endpointOn("none", "10.0.0.8", ready)}})
		u, _ := watchHosts(t, c)
		running, stopped := kube.Host{Name: "running", Address: "10.0.0.1:9811"}, kube.Host{Name: "stopped"}
		u.expect(t, "at first", 1, running, stopped)

		c.put(nodesPath+"running", nodeObject(object{"unrelated": "label"}))
		c.put(endpointsPath+"one", sliceOf(endpointOn("running", "10.0.0.1", ready)))
		u.expect(t, "changes without effect on hosts", 1, running, stopped)

		c.put(endpointsPath+"two", sliceOf(endpointOn("stopped", "fd00::2", ready)))
		stopped.Address = "[fd00::2]:9811"
		u.expect(t, "a driver starts", 2, running, stopped)

		c.put(endpointsPath+"one", sliceOf(endpointOn("running", "10.0.0.1", terminating), endpointOn("running", "10.0.0.3", notReady)))
		running.Address = "10.0.0.3:9811"
		u.expect(t, "another pod replaces a terminating one", 3, running, stopped)

		c.put(nodesPath+"none", nodeObject(registered))
		u.expect(t, "the kubelet of another node registers the driver", 4, kube.Host{Name: "none"}, running, stopped)

		c.remove(nodesPath + "running")
		c.remove(nodesPath + "none")
		synctest.Wait()
		u.mu.Lock()
		n := len(u.all) // two deletions cause one update or two
		u.mu.Unlock()
		u.expect(t, "two nodes are deleted", n, stopped)

		c.remove(endpointsPath + "two")
		stopped.Address = ""
		u.expect(t, "the last driver stops", n+1, stopped)
	})
}

// TestHostsSeveralEndpoints: which of two endpoints of a node is used does not depend on their order.
func TestHostsSeveralEndpoints(t *testing.T) {
	noAddress := object{"nodeName": "n", "addresses": []any{}, "conditions": ready}
	for name, tc := range map[string]struct {
		endpoints []object
		want      string
	}{
		"ready before not ready":        {[]object{endpointOn("n", "10.0.0.1", notReady), endpointOn("n", "10.0.0.2", ready)}, "10.0.0.2:9811"},
		"not ready before terminating":  {[]object{endpointOn("n", "10.0.0.1", terminating), endpointOn("n", "10.0.0.2", notReady)}, "10.0.0.2:9811"},
		"terminating before no address": {[]object{noAddress, endpointOn("n", "10.0.0.2", terminating)}, "10.0.0.2:9811"},
		"two ready endpoints":           {[]object{endpointOn("n", "10.0.0.2", ready), endpointOn("n", "10.0.0.1", ready)}, "10.0.0.1:9811"},
		"endpoint without a node":       {[]object{{"addresses": []any{"10.0.0.1"}, "conditions": ready}, endpointOn("n", "10.0.0.2", ready)}, "10.0.0.2:9811"},
		"endpoint without an address":   {[]object{noAddress}, ""},
		"same address twice":            {[]object{endpointOn("n", "10.0.0.1", terminating), endpointOn("n", "10.0.0.1", ready)}, "10.0.0.1:9811"},
	} {
		for _, reversed := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, reversed=%t", name, reversed), func(t *testing.T) {
				bubble(t, func(t *testing.T, c *cluster) {
					all := slices.Clone(tc.endpoints)
					if reversed {
						slices.Reverse(all)
					}
					c.put(nodesPath+"n", nodeObject(registered))
					for i, e := range all {
						c.put(fmt.Sprint(endpointsPath, i), sliceOf(e))
					}
					u, _ := watchHosts(t, c)
					u.expect(t, name, 1, kube.Host{Name: "n", Address: tc.want})
				})
			})
		}
	}
}

// TestNoHosts: in a cluster without nodes, WatchHosts calls update once, with no hosts.
func TestNoHosts(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		u, _ := watchHosts(t, c)
		u.expect(t, "an empty cluster", 1)
	})
}

// TestHostsWaitForAll: no hosts are reported before both Nodes and EndpointSlices are read, because without
// EndpointSlices all hosts would appear to have no driver.
func TestHostsWaitForAll(t *testing.T) {
	for _, resource := range []string{"nodes", "endpointslices"} {
		bubble(t, func(t *testing.T, c *cluster) {
			c.put(nodesPath+"n", nodeObject(registered))
			c.put(endpointsPath+"one", sliceOf(endpointOn("n", "10.0.0.1", ready)))
			c.fail["WATCH "+resource] = slices.Repeat([]int{403}, 20)
			c.fail["GET "+resource] = slices.Repeat([]int{403}, 20)
			u, log := watchHosts(t, c)
			u.expect(t, resource+" forbidden", 0)
			time.Sleep(time.Hour)
			u.expect(t, resource+" allowed", 1, kube.Host{Name: "n", Address: "10.0.0.1:9811"})
			if got := log.count("retrying"); got != 1 {
				t.Errorf("%s: got %d error lines, want 1:\n%s", resource, got, log)
			}
		})
	}
}

// TestHostsWithoutAPIServer: the hosts do not change while the API server does not answer, and are updated
// when it answers again.
func TestHostsWithoutAPIServer(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		c.put(nodesPath+"n", nodeObject(registered))
		u, log := watchHosts(t, c)
		u.expect(t, "at first", 1, kube.Host{Name: "n"})
		c.setUnreachable(true)
		time.Sleep(time.Hour)
		c.put(endpointsPath+"one", sliceOf(endpointOn("n", "10.0.0.1", ready)))
		c.put(nodesPath+"m", nodeObject(registered))
		u.expect(t, "API server unreachable", 1, kube.Host{Name: "n"})
		c.setUnreachable(false)
		time.Sleep(time.Hour)
		u.mu.Lock()
		last := u.all[len(u.all)-1]
		u.mu.Unlock()
		if want := []kube.Host{{Name: "m"}, {Name: "n", Address: "10.0.0.1:9811"}}; !reflect.DeepEqual(last, want) {
			t.Errorf("after the outage: got %v, want %v", last, want)
		}
		if n := log.count("connection refused"); n != 2 {
			t.Errorf("got %d error lines, want 2, one per watch:\n%s", n, log)
		}
	})
}

// TestHostsNoConnection: a WatchHosts that cannot connect returns when its context ends. InCluster always fails
// here, because the test does not run in a pod.
func TestHostsNoConnection(t *testing.T) {
	bubble(t, func(t *testing.T, _ *cluster) {
		u := &updates{}
		log, stop := start(t, func(ctx context.Context) { kube.WatchHosts(ctx, kube.InCluster, "", "", u.add) })
		time.Sleep(time.Hour)
		stop()
		u.expect(t, "no connection", 0)
		if got := log.count("Connecting to the API server failed"); got != 1 {
			t.Errorf("got %d error lines, want 1:\n%s", got, log)
		}
	})
}
