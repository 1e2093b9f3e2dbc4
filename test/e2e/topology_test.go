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

// TestTopology: a node without room gets no more volumes, because the scheduler knows
// and passes it over, and not because the driver refuses: it is not even asked.
func TestTopology(t *testing.T) {
	ns := newNamespace(t, "topology")
	broken(t, "      name: default\n", "      name: default\n      size: 4Gi\n")
	immediateClass(t)
	waitDriver(t)
	full, other := nodes()[0], nodes()[1]
	for _, n := range nodes() {
		waitRoom(t, n, 3*gi, 4*gi)
	}

	moveIn(t, ns, tenant{name: "filler", node: full.name, size: "3Gi"})
	waitRoom(t, full, 0, gi)
	waitRoom(t, other, 3*gi, 4*gi)

	// Without a pod the driver chooses: where there is more room.
	applyText(t, ns, claim("immediate", "immediate", "256Mi", ""))
	if at := placeOf(t, volumeOf(t, ns, "immediate")); at != other.name {
		t.Errorf("the volume of immediate binding was made on %s, which has less room", at)
	}
	for i := range 3 {
		name := fmt.Sprint("tenant-", i)
		moveIn(t, ns, tenant{name: name, size: "1Gi"})
		if at := placeOf(t, volumeOf(t, ns, name)); at != other.name {
			t.Errorf("%s is on %s, which has no room", name, at)
		}
	}
	waitRoom(t, other, 0, gi)

	// Where it must be is no room: it waits until there is.
	applyText(t, ns, tenant{name: "pinned", node: full.name, size: "1Gi"}.manifest())
	eventuallySays(t, time.Minute, ns, "pod/pinned", "did not have enough free storage")
	applyText(t, ns, tenant{name: "anywhere", size: "1Gi"}.manifest())
	eventuallySays(t, time.Minute, ns, "pod/anywhere", "2 node(s) did not have enough free storage")
	kubectl(t, "-n", ns, "delete", "pod,pvc", "anywhere")
	moveOut(t, ns, "filler")
	kubectl(t, "-n", ns, "wait", "pod", "pinned", "--for=condition=Ready", "--timeout=3m")

	made := creations(t)
	if made["OK"] < 6 {
		t.Errorf("6 volumes were made, and the nodes' drivers counted %v", made)
	}
	for code, n := range made {
		if code != "OK" && n > 0 {
			t.Errorf("CreateVolume failed %v times with %s", n, code)
		}
	}
}

// waitRoom waits until Kubernetes knows that a node's room is between two bounds.
func waitRoom(t *testing.T, n node, least, most int64) {
	t.Helper()
	eventually(t, time.Minute, fmt.Sprintf("room on %s from %d to %d", n.name, least, most), func() (string, bool) {
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

// creations are how often the nodes' drivers have answered CreateVolume, by code.
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

// metrics are those of the node's driver.
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

// driverAddress is the address of the driver's pod on the node.
func (n node) driverAddress(t *testing.T) string {
	t.Helper()
	return kubectl(t, "-n", namespace, "get", "pod", n.driverPod(t), "-o", "jsonpath={.status.podIP}")
}
