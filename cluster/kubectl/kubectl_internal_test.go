package kubectl

import (
	"encoding/json"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"sigs.k8s.io/yaml"

	"github.com/trivet-csi/trivet/cluster/kube"
	"github.com/trivet-csi/trivet/cluster/status"
)

const (
	claimed   = "loop:fast.01234567:pvc-1"
	orphaned  = "loop:fast.01234567:pvc-2"
	missing   = "loop:fast.01234567:pvc-3"
	elsewhere = "loop:slow.89abcdef:pvc-4" // in a pool that is not open
)

// object parses a JSON object as the API server returns it.
func object[T any](t *testing.T, text string) (v T) {
	t.Helper()
	if err := json.Unmarshal([]byte(text), &v); err != nil {
		t.Fatal(err)
	}
	return v
}

func persistentVolume(t *testing.T, name, handle, claim string) kube.PersistentVolume {
	t.Helper()
	return object[kube.PersistentVolume](t, `{"metadata":{"name":"`+name+`"},"spec":{"csi":{"driver":"d","volumeHandle":"`+handle+`"},"claimRef":{"namespace":"ns","name":"`+claim+`"},"storageClassName":"fast"}}`)
}

func sample() status.Report {
	return status.Report{
		Driver: "d", Processes: []status.Process{{Node: "a"}, {Node: "b", Problem: "no answer"}},
		Pools: []status.Pool{{Name: "fast", UUID: "01234567", Node: "a"}, {Name: "slow", Node: "a", Problem: "not mounted"}},
		Volumes: []status.Volume{
			{ID: claimed, Name: "pvc-1", Pool: "fast", Node: "a"},
			{ID: orphaned, Name: "pvc-2", Pool: "fast", Node: "a", SizeBytes: 1 << 30},
			{ID: "loop:fast.01234567:inline", Pool: "fast", Node: "a", Pod: "ns/web"},
			{ID: "loop:fast.01234567:flex", Pool: "fast", Node: "a", Namespace: "ns"},
			{Name: "damaged", Pool: "fast", Node: "a"},
		},
		Snapshots: []status.Snapshot{{ID: "loop:fast.01234567:s1", Source: claimed, Pool: "fast", Node: "a"}, {ID: "loop:fast.01234567:s2", Source: claimed, Pool: "fast", Node: "a", SizeBytes: 5}},
	}
}

// TestJoin: a volume has its PersistentVolume, its claim and the pods that use it. Completed pods do not use it.
func TestJoin(t *testing.T) {
	pods := []kube.Pod{
		object[kube.Pod](t, `{"metadata":{"namespace":"ns","name":"web-0"},"spec":{"volumes":[{"name":"data","persistentVolumeClaim":{"claimName":"data"}},{"name":"tmp"}]},"status":{"phase":"Running"}}`),
		object[kube.Pod](t, `{"metadata":{"namespace":"ns","name":"job"},"spec":{"volumes":[{"name":"data","persistentVolumeClaim":{"claimName":"data"}}]},"status":{"phase":"Succeeded"}}`),
		object[kube.Pod](t, `{"metadata":{"namespace":"other","name":"web-0"},"spec":{"volumes":[{"name":"data","persistentVolumeClaim":{"claimName":"data"}}]},"status":{"phase":"Running"}}`),
		object[kube.Pod](t, `{"metadata":{"namespace":"ns","name":"scratch"},"spec":{"volumes":[{"name":"space","ephemeral":{}}]},"status":{"phase":"Pending"}}`),
	}
	r := sample()
	r.Volumes = append(r.Volumes, status.Volume{ID: "loop:fast.01234567:e", Name: "e", Pool: "fast", Node: "a"})
	got := map[string]Volume{}
	released := persistentVolume(t, "pv-2", orphaned, "data")
	released.Status.Phase = "Released"
	for _, v := range join(r, []kube.PersistentVolume{
		persistentVolume(t, "pv-1", claimed, "data"), persistentVolume(t, "pv-e", "loop:fast.01234567:e", "scratch-space"), released,
	}, pods) {
		got[v.ID] = v
	}
	if v := got[claimed]; v.PersistentVolume != "pv-1" || v.Claim != "ns/data" || v.StorageClass != "fast" || !slices.Equal(v.Pods, []string{"ns/web-0"}) || v.Snapshots != 2 {
		t.Errorf("got %+v for a volume with a claim, want pv-1, ns/data, ns/web-0 and two snapshots", v)
	}
	if v := got["loop:fast.01234567:e"]; !slices.Equal(v.Pods, []string{"ns/scratch"}) {
		t.Errorf("got pods %v of a generic ephemeral volume, want ns/scratch", v.Pods)
	}
	if v := got[orphaned]; v.Phase != "Released" || v.Claim != "ns/data" || v.Pods != nil {
		t.Errorf("got %+v for a released PersistentVolume, want its phase, its former claim and no pods", v)
	}
	if v := got["loop:fast.01234567:inline"]; v.Claim != "" || !slices.Equal(v.Pods, []string{"ns/web"}) {
		t.Errorf("got %+v for an inline volume, want the pod ns/web and no claim", v)
	}
	if v := got[""]; v.Name != "damaged" || v.PersistentVolume != "" {
		t.Errorf("got %+v for a volume without an ID, want no PersistentVolume", v)
	}
}

// TestOrphans: only what certainly has no counterpart is an orphan.
func TestOrphans(t *testing.T) {
	volumes := []kube.PersistentVolume{
		persistentVolume(t, "pv-1", claimed, "data"), persistentVolume(t, "pv-3", missing, "gone"),
		persistentVolume(t, "pv-4", elsewhere, "closed"), persistentVolume(t, "pv-static", "any text", "static"),
	}
	contents := []kube.SnapshotContent{
		object[kube.SnapshotContent](t, `{"metadata":{"name":"c1"},"spec":{"driver":"d"},"status":{"snapshotHandle":"loop:fast.01234567:s1"}}`),
		object[kube.SnapshotContent](t, `{"metadata":{"name":"c3"},"spec":{"driver":"d","source":{"snapshotHandle":"loop:fast.01234567:s3"}}}`),
		object[kube.SnapshotContent](t, `{"metadata":{"name":"new"},"spec":{"driver":"d"}}`),
	}
	orphans := findOrphans(sample(), volumes, contents)
	var got []string
	for _, o := range orphans {
		got = append(got, o.Kind+" "+o.Name)
		if o.Reason == "" || o.CleanUp == "" {
			t.Errorf("%s %s has no reason or no command: %+v", o.Kind, o.Name, o)
		}
	}
	want := []string{"volume " + orphaned, "PersistentVolume pv-3", "snapshot loop:fast.01234567:s2", "VolumeSnapshotContent c3"}
	if !slices.Equal(got, want) {
		t.Errorf("got orphans %q, want %q", got, want)
	}
	lost := persistentVolume(t, "pv-lost", "loop:fast.fedcba98:pvc-5", "lost")
	if got := findOrphans(sample(), []kube.PersistentVolume{lost}, nil); slices.ContainsFunc(got, func(o Orphan) bool { return o.Name == "pv-lost" }) {
		t.Errorf("got %+v although a node does not report, want no orphan of an unknown pool", got)
	}
	lost.Spec.NodeAffinity.Required.NodeSelectorTerms = object[[]kube.NodeSelectorTerm](t, `[{"matchExpressions":[{"key":"csi.trivet.dev/node","operator":"In","values":["z"]}]}]`)
	complete := sample()
	complete.Processes, complete.Pools = complete.Processes[:1], complete.Pools[:1]
	if got := findOrphans(complete, []kube.PersistentVolume{lost}, nil); !slices.ContainsFunc(got, func(o Orphan) bool {
		return o.Name == "pv-lost" && o.Node == "z" && strings.Contains(o.Reason, "no node has pool fast with the UUID fedcba98; it was on node z")
	}) {
		t.Errorf("got %+v, want the PersistentVolume of a pool that no node has", got)
	}
	examined := sample()
	examined.AddHealth("a", status.Examination{Volumes: []status.Examined{
		{ID: "loop:slow.89abcdef:flex", Health: []status.Health{{Status: "INACCESSIBLE", Reason: "PoolUnavailable"}}},
		{ID: missing, Health: []status.Health{{Status: "DATA_LOSS", Reason: "RecordDamaged"}}},
	}})
	for _, o := range findOrphans(examined, volumes, contents) {
		if o.Name == "loop:slow.89abcdef:flex" || o.Name == missing || o.Name == "pv-3" {
			t.Errorf("got %+v of a volume that only an examination has reported, want no orphan", o)
		}
	}
	twice := sample()
	twice.Pools = append(twice.Pools, status.Pool{Name: "fast", UUID: "01234567", Node: "b"})
	for _, o := range findOrphans(twice, volumes, contents) {
		if o.Kind == OrphanedPersistentVolume || o.Kind == OrphanedSnapshotContent {
			t.Errorf("got %+v although two nodes report its pool, want no such orphan", o)
		}
	}
}

// TestManifest: the object names the volume or snapshot, has the policy Delete, and a name that Kubernetes accepts.
func TestManifest(t *testing.T) {
	for kind, wants := range map[string][]string{
		OrphanedVolume:   {"kind: PersistentVolume", "volumeHandle: " + orphaned, "persistentVolumeReclaimPolicy: Delete", `storage: "1024"`, "pv.kubernetes.io/provisioned-by: d"},
		OrphanedSnapshot: {"kind: VolumeSnapshotContent", "snapshotHandle: " + orphaned, "deletionPolicy: Delete"},
	} {
		text, err := Manifest("d", Orphan{Kind: kind, Name: orphaned, SizeBytes: 1024})
		if err != nil {
			t.Fatal(err)
		}
		for _, want := range wants {
			if !strings.Contains(text, want) {
				t.Errorf("the manifest of a %s lacks %q:\n%s", kind, want, text)
			}
		}
		var parsed map[string]any
		if err := yaml.Unmarshal([]byte(text), &parsed); err != nil {
			t.Errorf("the manifest of a %s: %v", kind, err)
		}
	}
	if text, err := Manifest("d", Orphan{Kind: OrphanedPersistentVolume, Name: "pv", CleanUp: "kubectl delete"}); err == nil || !strings.Contains(err.Error(), "kubectl delete") {
		t.Errorf("got %q, %v for a PersistentVolume, want an error with its command", text, err)
	}
}

func TestVolumeRates(t *testing.T) {
	begin := time.Unix(100, 0)
	at := func(after time.Duration, io ...*status.IO) status.Report {
		r := status.Report{Time: begin.Add(after)}
		for i, s := range io {
			r.Volumes = append(r.Volumes, status.Volume{ID: string(rune('a' + i)), IO: s})
		}
		return r
	}
	before := at(0, &status.IO{Reads: 10, ReadBytes: 1000}, &status.IO{Writes: 5}, &status.IO{Reads: 50}, nil)
	after := at(2*time.Second, &status.IO{Reads: 30, ReadBytes: 5000, BusySeconds: .5}, &status.IO{Writes: 5, WrittenBytes: 8000}, &status.IO{Reads: 1}, &status.IO{Reads: 1})
	got := VolumeRates(before, after)
	if len(got) != 2 || got[0].ID != "b" || got[0].WrittenBytes != 4000 || got[1].ID != "a" || got[1].Reads != 10 || got[1].ReadBytes != 2000 || got[1].BusyPercent != 25 {
		t.Errorf("got %+v, want b with 4000 bytes per second before a with 2000, and neither the device that was replaced nor the one that was attached later", got)
	}
	if again := VolumeRates(after, after); len(again) != 0 {
		t.Errorf("got %+v of two reports of the same time, want no rates", again)
	}
}

// TestRateOfOtherDevice: the counters of two devices are not compared.
func TestRateOfOtherDevice(t *testing.T) {
	at := func(seconds int64, device string) status.Report {
		io := &status.IO{Writes: uint64(seconds)}
		return status.Report{Time: time.Unix(seconds, 0), Volumes: []status.Volume{{ID: claimed, Node: "a", Device: device, IO: io}}}
	}
	if got := VolumeRates(at(1, "/dev/loop1"), at(2, "/dev/loop2")); len(got) != 0 {
		t.Errorf("got %+v for a volume that was attached again, want none", got)
	}
	if got := VolumeRates(at(1, "/dev/loop1"), at(2, "/dev/loop1")); len(got) != 1 {
		t.Errorf("got %+v for a volume with the same device, want its rate", got)
	}
}

func TestCallRates(t *testing.T) {
	report := func(calls ...status.Call) status.Report {
		return status.Report{Processes: []status.Process{{Node: "a", Calls: calls}}}
	}
	before := report(status.Call{Method: "Stage", Count: 10, TotalSeconds: 1}, status.Call{Method: "Idle", Count: 7}, status.Call{Method: "Restarted", Count: 100, TotalSeconds: 50})
	after := report(
		status.Call{Method: "Stage", Count: 14, Failed: 1, TotalSeconds: 3}, status.Call{Method: "Idle", Count: 7},
		status.Call{Method: "Restarted", Count: 2, TotalSeconds: 1}, status.Call{Method: "Create", Running: 1},
	)
	got := CallRates(before, after)
	if len(got) != 3 || got[0].Method != "Create" || got[1].Method != "Stage" || got[1].Count != 4 || got[1].Failed != 1 || math.Abs(got[1].MeanSeconds-.5) > 1e-9 || got[2].Count != 2 || got[2].MeanSeconds != .5 {
		t.Errorf("got %+v, want Create, which is running, then Stage with 4 calls of 0.5 s, then Restarted with 2", got)
	}
}

// TestReporter: a ready pod of the controller reports. Without a controller, it is a pod of a node.
func TestReporter(t *testing.T) {
	pod := func(name, component, phase, ready string) kube.Pod {
		return object[kube.Pod](t, `{"metadata":{"name":"`+name+`","labels":{"app.kubernetes.io/component":"`+component+`"}},"status":{"phase":"`+phase+`","conditions":[{"type":"Ready","status":"`+ready+`"}]}}`)
	}
	node, waiting, broken, ready := pod("node", "node", "Running", "True"), pod("waiting", "controller", "Pending", "False"), pod("broken", "controller", "Running", "False"), pod("ready", "controller", "Running", "True")
	for want, pods := range map[string][]kube.Pod{
		"ready":  {waiting, broken, ready, node},
		"broken": {waiting, broken, node},
		"node":   {node},
		"":       {waiting, node},
	} {
		got, err := reporter(pods)
		if got.Metadata.Name != want || (err != nil) != (want == "") {
			t.Errorf("got pod %q and error %v, want %q", got.Metadata.Name, err, want)
		}
	}
	ready.Metadata.DeletionTimestamp = "2026-01-02T03:04:05Z"
	if got, err := reporter([]kube.Pod{ready, broken, node}); err != nil || got.Metadata.Name != "broken" {
		t.Errorf("got pod %q and error %v, want the pod that is not ending", got.Metadata.Name, err)
	}
	if got, err := reporter([]kube.Pod{ready, node}); err == nil || !strings.Contains(err.Error(), "being removed or restarted") {
		t.Errorf("got pod %q and error %v, want an error because the controller is ending", got.Metadata.Name, err)
	}
}

// TestExplain: the error of a pod that does not answer names the pod and its namespace.
func TestExplain(t *testing.T) {
	_, err := fetch(t.Context(), "http://localhost:0/status")
	err = explain(err, object[kube.Pod](t, `{"metadata":{"name":"trivet-0","namespace":"storage"}}`))
	if err == nil || !strings.Contains(err.Error(), "kubectl -n storage describe pod trivet-0") {
		t.Errorf("got error %v, want one with the command that describes the pod", err)
	}
}
