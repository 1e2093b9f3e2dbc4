package move_test

import (
	"strings"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/cluster/move"
	"github.com/trivet-csi/trivet/cluster/status"
)

// protectable are the answers of an API server with a claim that can be protected.
func protectable() map[string]string {
	answers := objects()
	answers["/api/v1/namespaces/trivet-system/serviceaccounts"] = `{"metadata":{},"items":[{"metadata":{"namespace":"trivet-system","name":"trivet-protection"}}]}`
	for _, path := range []string{"/api/v1/namespaces/ns/persistentvolumeclaims", "/apis/snapshot.storage.k8s.io/v1/namespaces/ns/volumesnapshots", "/apis/batch/v1/namespaces/trivet-system/cronjobs"} {
		answers[path] = `{"metadata":{},"items":[]}`
	}
	answers["/api/v1/nodes/a"] = strings.ReplaceAll(answers["/api/v1/nodes/b"], `"b"`, `"a"`)
	return answers
}

// TestProtectRefusals: a claim of which no copies can be kept is refused, and nothing is written.
func TestProtectRefusals(t *testing.T) {
	const class = "/apis/storage.k8s.io/v1/storageclasses/fast"
	replaced := func(path string, change ...string) func(map[string]string) {
		return func(o map[string]string) { o[path] = strings.NewReplacer(change...).Replace(o[path]) }
	}
	for name, tc := range map[string]struct {
		change func(map[string]string)
		on     string
		every  time.Duration
		keep   int
		room   int64
		copyOf string
		unused bool
		want   string
	}{
		"period":              {every: 7 * time.Minute, want: "--every 7m0s: a CronJob cannot run with this period"},
		"too many copies":     {keep: 33, want: "--keep 33"},
		"negative":            {keep: -1, want: "--keep -1"},
		"not enabled":         {change: replaced("/api/v1/namespaces/trivet-system/serviceaccounts", `{"metadata":{"namespace":"trivet-system","name":"trivet-protection"}}`, ""), want: "protection.enabled=true"},
		"same node":           {on: "a", want: "already on this node"},
		"no such node":        {on: "c", want: "no such node"},
		"kept copies":         {change: replaced(class, `"provisioner"`, `"reclaimPolicy":"Retain","provisioner"`), want: "reclaim policy Retain"},
		"released class":      {change: replaced(class, `{"pool"`, `{"onNodeLoss":"release","pool"`), want: "cannot be recovered"},
		"released volume":     {change: replaced("/api/v1/persistentvolumes/pv", `"volumeHandle"`, `"volumeAttributes":{"onNodeLoss":"release"},"volumeHandle"`), want: "cannot be recovered"},
		"kept with its node":  {change: replaced(class, `{"pool"`, `{"onNodeLoss":"keep","pool"`), want: "has no pods with the label"},
		"copy of a copy":      {change: replaced("/api/v1/namespaces/ns/persistentvolumeclaims/data", `"uid"`, `"labels":{"csi.trivet.dev/protect":"x"},"uid"`), copyOf: "w", want: "is a copy of the claim with the UID x"},
		"only the label":      {change: replaced("/api/v1/namespaces/ns/persistentvolumeclaims/data", `"uid"`, `"labels":{"csi.trivet.dev/protect":"x"},"uid"`), want: "has no pods with the label"},
		"no room":             {room: 2 << 30, want: "3 copies of the volume need 3 GiB"},
		"no controller":       {want: "has no pods with the label"},
		"room for fewer":      {room: 2 << 30, keep: 1, want: "has no pods with the label"},
		"local copies":        {change: replaced(class, `{"pool"`, `{"copies":"local","pool"`), want: "copies: local"},
		"no snapshot classes": {change: func(o map[string]string) { delete(o, "/apis/snapshot.storage.k8s.io/v1/volumesnapshotclasses") }, want: "has no VolumeSnapshotClass"},
		"only while unused":   {unused: true, want: "claim ns/data cannot be protected: no snapshot of the volume can be taken while it is in use"},
	} {
		t.Run(name, func(t *testing.T) {
			answers, report := protectable(), drivers()
			answers["/api/v1/namespaces/trivet-system/pods"] = `{"metadata":{},"items":[]}`
			if tc.change != nil {
				tc.change(answers)
			}
			report.Volumes[0].CopyOf, report.Volumes[0].NoLiveSnapshots = tc.copyOf, tc.unused
			if tc.room > 0 {
				report.Pools[1] = status.Pool{Name: "fast", Node: "b", RoomBytes: tc.room}
			}
			o := move.ProtectOptions{Options: move.Options{Namespace: "ns", ClaimName: "data", To: "b", Transfers: isImage}, Every: time.Hour, Kept: tc.keep}
			if tc.on != "" {
				o.To = tc.on
			}
			if tc.every != 0 {
				o.Every = tc.every
			}
			if err := move.Protect(t.Context(), connect(t, answers), report, o); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want an error that contains %q", err, tc.want)
			}
		})
	}
}

// TestCopyOnceRefusals: a Job makes no copy of another claim, during a move, or on the node of the volume.
func TestCopyOnceRefusals(t *testing.T) {
	const claim, nodeB = "/api/v1/namespaces/ns/persistentvolumeclaims/data", "/api/v1/nodes/b"
	for name, tc := range map[string]struct {
		path, old, by string
		on, want      string
	}{
		"another claim":   {path: claim, old: `"uid":"u"`, by: `"uid":"v"`, want: "was deleted: end its protection with 'kubectl trivet protect -n ns data --stop'"},
		"being moved":     {path: claim, old: `"uid":"u"`, by: `"annotations":{"csi.trivet.dev/move":"1 copy"},"uid":"u"`, want: "is being moved or recovered (1 copy)"},
		"same node":       {on: "a", want: "a copy there protects nothing"},
		"not ready":       {path: nodeB, old: `"True"`, by: `"Unknown"`, want: "the node is not ready"},
		"lost node":       {path: "/api/v1/nodes/a", old: `"True"`, by: `"Unknown"`, want: "node a of the volume is not ready: no copy can be made"},
		"other volume":    {path: "/api/v1/persistentvolumes/pv", old: `"uid":"u"`, by: `"uid":"v"`, want: "belongs to claim ns/data with the UID \"v\""},
		"kept copies":     {path: "/apis/storage.k8s.io/v1/storageclasses/fast", old: `"provisioner"`, by: `"reclaimPolicy":"Retain","provisioner"`, want: "reclaim policy Retain"},
		"several volumes": {path: "/api/v1/persistentvolumes/pv", old: `["a"]`, by: `["a","c"]`, want: "does not select one node"},
	} {
		t.Run(name, func(t *testing.T) {
			answers := protectable()
			answers[tc.path] = strings.Replace(answers[tc.path], tc.old, tc.by, 1)
			o := move.ProtectOptions{Options: move.Options{Namespace: "ns", ClaimName: "data", To: "b"}}
			if tc.on != "" {
				o.To = tc.on
			}
			if err := move.CopyOnce(t.Context(), connect(t, answers), o, "u"); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want an error that contains %q", err, tc.want)
			}
		})
	}
}
