package driver_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/loop"
	"github.com/trivet-csi/trivet/driver"
)

// TestStatic runs what deploy/static has for a cluster without Kubernetes: drivers
// with those files, and certificates made by its script.
func TestStatic(t *testing.T) {
	const files = "../deploy/static/"
	dir := t.TempDir()
	for range 2 { // the second time the CA is there
		if out, err := exec.CommandContext(t.Context(), files+"certificates.sh", dir, "worker-1", "worker-2").CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	config := func(file string, oldnew ...string) driver.Config {
		b, err := os.ReadFile(files + file)
		must(t, err)
		c, err := driver.ParseConfig([]byte(strings.NewReplacer(oldnew...).Replace(string(b))), poolKinds)
		must(t, err)
		return c
	}
	member := func(service, node string, c driver.Config) *backendtest.Driver {
		o := options(t, loop.Kind)
		o.Services, o.NodeID, o.Config, o.HTTPAddress = []string{service}, node, c, backendtest.FreeAddress(t)
		return backendtest.StartWith(t, o)
	}
	addresses := []string{backendtest.FreeAddress(t), backendtest.FreeAddress(t)}
	for i, address := range addresses {
		node := fmt.Sprintf("worker-%d", i+1)
		member("node", node, config("node.yaml",
			"/var/lib/trivet/pools", t.TempDir(), "/etc/trivet/certificates", filepath.Join(dir, "nodes", node), ":9811", address))
	}
	router := member("controller", "", config("controller.yaml",
		"/etc/trivet/certificates", filepath.Join(dir, "controller"), "10.0.0.11:9811", addresses[0], "10.0.0.12:9811", addresses[1]))
	(&backendtest.Cluster{Router: router}).Await(t)
	_, page := get(t, router.Options.HTTPAddress, "/metrics")
	for _, want := range []string{
		`trivet_node_up{csi_node="worker-1"} 1`, `trivet_node_up{csi_node="worker-2"} 1`, `trivet_node_conflicting_pools{csi_node="worker-2"} 0`, `services="controller"`,
	} {
		if !strings.Contains(page, want) {
			t.Errorf("/metrics has no %s", want)
		}
	}
	for _, node := range []string{"worker-1", "worker-2"} {
		resp, err := router.Control.GetCapacity(t.Context(), &csi.GetCapacityRequest{
			AccessibleTopology: &csi.Topology{Segments: map[string]string{"csi.trivet.dev/node": node}},
		})
		if err != nil || resp.GetAvailableCapacity() == 0 {
			t.Errorf("%s: %v, %v", node, resp, err)
		}
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
