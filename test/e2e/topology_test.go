//go:build e2e

package e2e

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

const gi = 1 << 30

// TestTopology checks that the scheduler places no more volumes on a node without room, so that the driver on
// the node receives no CreateVolume calls that it would have to refuse.
func TestTopology(t *testing.T) {
	ns := newNamespace(t, "topology")
	applyChanged(t, "      name: default\n", "      name: default\n      size: 4Gi\n")
	immediateClass(t)
	waitDriver(t)
	full, other := nodes()[0], nodes()[1]
	for _, n := range nodes() {
		waitRoom(t, n, 3*gi, 4*gi)
	}

	startPod(t, ns, claimPod{name: "filler", node: full.name, size: "3Gi"})
	waitRoom(t, full, 0, gi)
	waitRoom(t, other, 3*gi, 4*gi)

	// For a claim without a pod, the driver chooses the node with more room.
	applyText(t, ns, claim("immediate", "immediate", "256Mi", ""))
	if at := nodeOfVolume(t, volumeOf(t, ns, "immediate")); at != other.name {
		t.Errorf("got volume with immediate binding on %s, want %s, which has more room", at, other.name)
	}
	for i := range 3 {
		name := fmt.Sprint("pod-", i)
		startPod(t, ns, claimPod{name: name, size: "1Gi"})
		if at := nodeOfVolume(t, volumeOf(t, ns, name)); at != other.name {
			t.Errorf("got volume of %s on %s, want %s, which has room", name, at, other.name)
		}
	}
	waitRoom(t, other, 0, gi)

	// A pod that must run on the full node waits until the node has room.
	applyText(t, ns, claimPod{name: "pinned", node: full.name, size: "1Gi"}.manifest())
	waitDescribed(t, time.Minute, ns, "pod/pinned", "did not have enough free storage")
	applyText(t, ns, claimPod{name: "anywhere", size: "1Gi"}.manifest())
	waitDescribed(t, time.Minute, ns, "pod/anywhere", "2 node(s) did not have enough free storage")
	kubectl(t, "-n", ns, "delete", "pod,pvc", "anywhere")
	deletePod(t, ns, "filler")
	kubectl(t, "-n", ns, "wait", "pod", "pinned", "--for=condition=Ready", "--timeout=3m")

	created := creations(t)
	if created["OK"] < 6 {
		t.Errorf("got CreateVolume calls %v on the nodes, want at least 6 with OK", created)
	}
	for code, n := range created {
		if code != "OK" && n > 0 {
			t.Errorf("got %d CreateVolume calls with %s, want 0", n, code)
		}
	}
}

// waitRoom waits until the CSIStorageCapacity of a node is between two bounds in bytes.
func waitRoom(t *testing.T, n node, least, most int64) {
	t.Helper()
	eventually(t, time.Minute, fmt.Sprintf("the CSIStorageCapacity of %s is from %d to %d bytes", n.name, least, most), func() (string, bool) {
		all, err := client.StorageV1().CSIStorageCapacities(namespace).List(t.Context(), metav1.ListOptions{})
		if err != nil {
			return err.Error(), false
		}
		seen := ""
		for _, c := range all.Items {
			if c.StorageClassName == "trivet-loop" && c.NodeTopology.MatchLabels["csi.trivet.dev/node"] == n.name && c.Capacity != nil {
				seen = c.Capacity.String()
				if room := c.Capacity.Value(); least <= room && room <= most {
					return seen, true
				}
			}
		}
		return seen, false
	})
}

// creations returns how often the nodes' drivers have answered CreateVolume, by gRPC code.
func creations(t *testing.T) map[string]uint64 {
	t.Helper()
	counted := map[string]uint64{}
	for _, n := range nodes() {
		parser := expfmt.NewTextParser(model.UTF8Validation)
		families, err := parser.TextToMetricFamilies(strings.NewReader(n.metrics(t)))
		must(t, err)
		for _, m := range families["csi_plugin_operations_seconds"].GetMetric() {
			labels := map[string]string{}
			for _, l := range m.GetLabel() {
				labels[l.GetName()] = l.GetValue()
			}
			if labels["method_name"] == "/csi.v1.Controller/CreateVolume" {
				counted[labels["grpc_status_code"]] += m.GetHistogram().GetSampleCount()
			}
		}
	}
	return counted
}

// metrics returns the metrics of the node's driver.
func (n node) metrics(t *testing.T) string {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+n.driverAddress(t)+":9810/metrics", nil)
	must(t, err)
	answer, err := http.DefaultClient.Do(request)
	must(t, err)
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	must(t, err)
	return string(text)
}

// driverAddress returns the IP address of the driver's pod on the node.
func (n node) driverAddress(t *testing.T) string {
	t.Helper()
	return kubectl(t, "-n", namespace, "get", "pod", n.driverPod(t), "-o", "jsonpath={.status.podIP}")
}
