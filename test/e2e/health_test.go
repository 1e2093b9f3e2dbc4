//go:build e2e

package e2e

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/cluster/status"
)

// healthTime is the time in which a user sees a condition of a volume, and its end.
const healthTime = 90 * time.Second

// TestHealth removes the image of a volume in use, and lets its filesystem report an error. Within 90 seconds, the claim and the pod have
// events, and `kubectl trivet volumes` and the metrics of the node show both conditions. After the repair, neither shows them, and
// an event of the claim says so.
func TestHealth(t *testing.T) {
	ns, plugin := newNamespace(t, "health"), installPlugin(t, "trivet")
	pod := claimPod{name: "data"}
	startPod(t, ns, pod)
	n := nodeNamed(t, nodeOf(t, ns, "data"))
	handle := kubectl(t, "get", "pv", volumeOf(t, ns, "data"), "-o", "jsonpath={.spec.csi.volumeHandle}")
	v := ownVolume(t, plugin, handle)
	if len(v.Health) != 0 || v.Content != "ext4" {
		t.Fatalf("got volume %+v, want ext4 without conditions", v)
	}
	events := func(kind string) string {
		return kubectl(t, "-n", ns, "get", "events", "--field-selector", "involvedObject.kind="+kind+",involvedObject.name=data",
			"-o", `jsonpath={range .items[*]}{.type} {.reason}: {.message}{"\n"}{end}`)
	}
	// seen returns what a user sees of a condition: the events, the reasons of the volume, and the metrics.
	seen := func(reason string) (claimEvents, podEvents string, listed, counted bool) {
		has := func(h status.Health) bool { return h.Reason == reason }
		return events("PersistentVolumeClaim"), events("Pod"), slices.ContainsFunc(ownVolume(t, plugin, handle).Health, has),
			strings.Contains(n.metrics(t), `trivet_volume_health{reason="`+reason+`"`)
	}

	image := n.path(filepath.Join(defaultPool, "volumes", v.Name, "image"))
	must(t, os.Rename(image, image+".away"))
	t.Cleanup(func() { _ = os.Rename(image+".away", image) }) // fails after the repair
	must(t, os.WriteFile("/sys/fs/ext4/"+filepath.Base(v.Device)+"/trigger_fs_error", []byte("test"), 0))
	broken := time.Now()
	reasons := []string{"ImageMissing", "FilesystemErrors"}
	for _, reason := range reasons {
		eventually(t, healthTime-time.Since(broken), "the condition "+reason+" is seen everywhere", func() (string, bool) {
			claimEvents, podEvents, listed, counted := seen(reason)
			return claimEvents + podEvents, strings.Contains(claimEvents, "Warning "+reason) && strings.Contains(podEvents, "Warning "+reason) && listed && counted
		})
	}

	must(t, os.Rename(image+".away", image))
	kubectl(t, "-n", ns, "delete", "pod", "data", "--timeout=2m")
	startPod(t, ns, pod) // stages the volume, which checks the filesystem
	repaired := time.Now()
	for _, reason := range reasons {
		eventually(t, healthTime-time.Since(repaired), "the condition "+reason+" is gone everywhere", func() (string, bool) {
			claimEvents, _, listed, counted := seen(reason)
			return claimEvents, strings.Contains(claimEvents, "Normal ConditionGone: "+reason) && !listed && !counted
		})
	}
	deletePod(t, ns, "data")
}
