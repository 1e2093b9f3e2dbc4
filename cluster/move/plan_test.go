package move_test

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"k8s.io/client-go/rest"

	"github.com/trivet-csi/trivet/cluster/kubectl"
	"github.com/trivet-csi/trivet/cluster/move"
	"github.com/trivet-csi/trivet/cluster/status"
)

const handle = "image:fast.01234567:pvc-1"

// objects are the answers of an API server by path, with a claim that can be moved from node a to node b.
func objects() map[string]string {
	list := func(items ...string) string { return `{"metadata":{},"items":[` + strings.Join(items, ",") + `]}` }
	return map[string]string{
		"/api/v1/namespaces/ns/persistentvolumeclaims/data": `{"metadata":{"namespace":"ns","name":"data","uid":"u"},
			"spec":{"accessModes":["ReadWriteOnce"],"storageClassName":"fast","volumeName":"pv","resources":{"requests":{"storage":"1Gi"}}},"status":{"phase":"Bound"}}`,
		"/api/v1/persistentvolumes/pv": `{"metadata":{"name":"pv"},"spec":{"capacity":{"storage":"1Gi"},"claimRef":{"namespace":"ns","name":"data","uid":"u"},"csi":{"driver":"d","volumeHandle":"` + handle + `"},
			"nodeAffinity":{"required":{"nodeSelectorTerms":[{"matchExpressions":[{"key":"csi.trivet.dev/node","operator":"In","values":["a"]}]}]}}}}`,

		"/apis/storage.k8s.io/v1/storageclasses/fast": `{"metadata":{"name":"fast"},"provisioner":"d","parameters":{"pool":"fast"}}`,
		"/api/v1/nodes/a":                    `{"metadata":{"name":"a"}}`,
		"/api/v1/nodes/b":                    `{"metadata":{"name":"b","labels":{"zone":"x"}},"status":{"conditions":[{"type":"Ready","status":"True"}]}}`,
		"/apis/storage.k8s.io/v1/csinodes/b": `{"spec":{"drivers":[{"name":"d","nodeID":"b"}]}}`,

		"/apis/snapshot.storage.k8s.io/v1/volumesnapshotclasses": list(`{"metadata":{"name":"snap"},"driver":"d","deletionPolicy":"Delete"}`, `{"metadata":{"name":"other"},"driver":"e","deletionPolicy":"Delete"}`),
		"/api/v1/namespaces/ns/pods":                             list(pod("")),
		"/api/v1/namespaces/ns/pods/db-0":                        pod(""),
		"/apis/authorization.k8s.io/v1/selfsubjectaccessreviews": `{"status":{"allowed":true}}`,
		"/api/v1/namespaces/ns/persistentvolumeclaims/second":    `{"metadata":{"name":"second"},"spec":{"volumeName":"pv-2"}}`,
		"/api/v1/persistentvolumes/pv-2":                         `{"metadata":{"name":"pv-2"},"spec":{"nodeAffinity":{"required":{"nodeSelectorTerms":[{"matchExpressions":[{"key":"zone","operator":"In","values":["x"]}]}]}}}}`,
		"/api/v1/namespaces/ns/persistentvolumeclaims/pinned":    `{"metadata":{"name":"pinned"},"spec":{"volumeName":"pv-3"}}`,
		"/api/v1/persistentvolumes/pv-3":                         `{"metadata":{"name":"pv-3"},"spec":{"nodeAffinity":{"required":{"nodeSelectorTerms":[{"matchExpressions":[{"key":"zone","operator":"In","values":["y"]}]}]}}}}`,
	}
}

// pod returns a pod of a StatefulSet that uses the claim on node a. Each change replaces a text by the next one.
func pod(change ...string) string {
	const text = `{"metadata":{"namespace":"ns","name":"db-0","uid":"p","ownerReferences":[{"kind":"StatefulSet","name":"db","controller":true}]},
		"spec":{"nodeName":"a","volumes":[{"name":"v","persistentVolumeClaim":{"claimName":"data"}}]},"status":{"phase":"Running"}}`
	if len(change) < 2 {
		return text
	}
	return strings.NewReplacer(change...).Replace(text)
}

// connect connects to an API server with answers. It fails the test if anything is written.
func connect(t *testing.T, answers map[string]string) *kubectl.Cluster {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodGet && !strings.HasSuffix(r.URL.Path, "/selfsubjectaccessreviews") {
			t.Errorf("got %s %s, want that the plan changes nothing", r.Method, r.URL.Path)
		}
		serve(w, answers[r.URL.Path])
	}))
	t.Cleanup(server.Close)
	cluster, err := kubectl.Connect(&rest.Config{Host: server.URL}, "trivet-system")
	if err != nil {
		t.Fatal(err)
	}
	return cluster
}

// plan plans the move of the claim to a node.
func plan(t *testing.T, answers map[string]string, report status.Report, o move.Options) (move.Plan, error) {
	t.Helper()
	o.Namespace, o.ClaimName, o.Transfers = "ns", "data", isImage
	m, err := move.New(t.Context(), connect(t, answers), o)
	if err != nil {
		return move.Plan{}, err
	}
	return m.Plan(t.Context(), report)
}

func isImage(kind string) bool { return kind == "image" }

// serve writes an object as the API server does. An empty object is not found.
func serve(w http.ResponseWriter, text string) {
	w.Header().Set("Content-Type", "application/json")
	if text == "" {
		w.WriteHeader(http.StatusNotFound)
		_, _ = io.WriteString(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"NotFound","code":404}`)
		return
	}
	object := map[string]any{"kind": "Object", "apiVersion": "v1"}
	_ = json.Unmarshal([]byte(text), &object) // a wrong object fails the test
	if items, isList := object["items"].([]any); isList {
		object["kind"] = "ObjectList"
		for _, item := range items {
			item.(map[string]any)["kind"], item.(map[string]any)["apiVersion"] = "Object", "v1"
		}
	}
	_ = json.NewEncoder(w).Encode(object)
}

// drivers is a report of drivers with the volume, and room for three copies on node b.
func drivers() status.Report {
	return status.Report{
		Driver: "d", Volumes: []status.Volume{{ID: handle, Pool: "fast", Node: "a", SizeBytes: 1 << 30, UsedBytes: 1 << 20}},
		Pools: []status.Pool{{Name: "fast", Node: "a"}, {Name: "fast", Node: "b", RoomBytes: 3 << 30, LargestBytes: 3 << 30}},
	}
}

// TestPlan: the plan contains the pods with their controllers, and tells whether two copies fit.
func TestPlan(t *testing.T) {
	p, err := plan(t, objects(), drivers(), move.Options{To: "b"})
	want := move.PlannedPod{Name: "db-0", Controller: "StatefulSet/db"}
	if err != nil || p.From != "a" || p.SnapshotClass != "snap" || len(p.Pods) != 1 || p.Pods[0] != want || !p.Cordon || p.Single || p.SizeBytes != 1<<30 {
		t.Errorf("got %+v, %v, want a plan from a to b with db-0, a cordon and room for two copies", p, err)
	}
	small := drivers()
	small.Pools[1].RoomBytes = 3 << 29
	if p, err := plan(t, objects(), small, move.Options{To: "b"}); err != nil || !p.Single {
		t.Errorf("got %+v, %v with room for one copy, want that only one fits", p, err)
	}
	without := objects()
	delete(without, "/apis/snapshot.storage.k8s.io/v1/volumesnapshotclasses")
	if p, err := plan(t, without, drivers(), move.Options{To: "b"}); err != nil || !p.Single || p.SnapshotClass != "" || !strings.Contains(p.NoSnapshots, "docs/snapshots.md") {
		t.Errorf("got %+v, %v without a snapshot class, want that the volume is copied while the pods are stopped, and why", p, err)
	}
	disk := drivers()
	disk.Volumes[0].NoLiveSnapshots = true
	if p, err := plan(t, objects(), disk, move.Options{To: "b"}); err != nil || !p.Single || p.SnapshotClass != "" || !strings.Contains(p.NoSnapshots, "while it is in use") {
		t.Errorf("got %+v, %v for a volume without snapshots, want that it is copied while the pods are stopped, and why", p, err)
	}
	unused := objects()
	unused["/api/v1/namespaces/ns/pods"] = `{"metadata":{},"items":[` + pod(`"Running"`, `"Succeeded"`) + `]}`
	if p, err := plan(t, unused, drivers(), move.Options{To: "b"}); err != nil || !p.Cordon || len(p.Pods) != 0 {
		t.Errorf("got %+v, %v for a claim that only a completed pod uses, want no pods, and a cordon so that none starts", p, err)
	}
	zone := objects()
	usedPod(zone, `[{"name":"v"`, `[{"name":"w","persistentVolumeClaim":{"claimName":"second"}},{"name":"v"`, `"nodeName"`, `"nodeSelector":{"zone":"x"},"nodeName"`)
	if _, err := plan(t, zone, drivers(), move.Options{To: "b"}); err != nil {
		t.Errorf("got %v for a pod with another claim that node b reaches, and a selector of b, want a plan", err)
	}
}

// usedPod changes the pod that uses the claim.
func usedPod(answers map[string]string, change ...string) {
	answers["/api/v1/namespaces/ns/pods/db-0"] = pod(change...)
	answers["/api/v1/namespaces/ns/pods"] = fmt.Sprintf(`{"metadata":{},"items":[%s]}`, pod(change...))
}

// TestRefusals: a move that cannot succeed is refused with the reason and the value.
func TestRefusals(t *testing.T) {
	const claim, pv, class, nodeB = "/api/v1/namespaces/ns/persistentvolumeclaims/data", "/api/v1/persistentvolumes/pv", "/apis/storage.k8s.io/v1/storageclasses/fast", "/api/v1/nodes/b"
	const snapshotClasses = "/apis/snapshot.storage.k8s.io/v1/volumesnapshotclasses"
	replaced := func(path string, change ...string) func(map[string]string) {
		return func(o map[string]string) { o[path] = strings.NewReplacer(change...).Replace(o[path]) }
	}
	changedPod := func(change ...string) func(map[string]string) {
		return func(o map[string]string) { usedPod(o, change...) }
	}
	for name, tc := range map[string]struct {
		change  func(map[string]string)
		options move.Options
		want    string
	}{
		"not bound":            {change: replaced(claim, `"Bound"`, `"Pending"`), want: "claim ns/data is Pending"},
		"being deleted":        {change: replaced(claim, `"uid"`, `"deletionTimestamp":"2026-01-01T00:00:00Z","uid"`), want: "is being deleted"},
		"many nodes":           {change: replaced(claim, "ReadWriteOnce", "ReadWriteMany"), want: `access modes ["ReadWriteMany"]`},
		"claim of a pod":       {change: replaced(claim, `"uid"`, `"ownerReferences":[{"kind":"Pod","name":"x"}],"uid"`), want: "belongs to pod x"},
		"other driver":         {change: replaced(pv, `"d"`, `"e"`), want: `has the driver "e"`},
		"of another claim":     {change: replaced(pv, `"uid":"u"`, `"uid":"v"`), want: "belongs to claim ns/data with the UID \"v\""},
		"static volume":        {change: replaced(pv, handle, "some text"), want: "was not created by this driver"},
		"export":               {change: replaced(pv, "fast.01234567", "nas"), want: "is on an export"},
		"other kind":           {change: replaced(pv, "image:", "disk:"), want: "backend disk cannot send a volume"},
		"several nodes":        {change: replaced(pv, `["a"]`, `["a","c"]`), want: "does not select one node"},
		"unknown volume":       {change: replaced(pv, "pvc-1", "pvc-2"), want: "is not in the report"},
		"no class":             {change: replaced(claim, `"fast"`, `""`), want: "has no StorageClass"},
		"class is gone":        {change: replaced(claim, `"fast"`, `"gone"`), want: `StorageClass "gone" of the claim does not exist`},
		"class of another":     {change: replaced(class, `"d"`, `"e"`), want: `has the provisioner "e"`},
		"local copies":         {change: replaced(class, `{"pool"`, `{"copies":"local","pool"`), want: "copies: local"},
		"same node":            {options: move.Options{To: "a"}, want: `node "a": the volume is already on this node`},
		"no such node":         {options: move.Options{To: "c"}, want: `node "c": the cluster has no such node`},
		"not ready":            {change: replaced(nodeB, `"True"`, `"Unknown"`), want: "the node is not ready"},
		"cordoned":             {change: replaced(nodeB, `"status"`, `"spec":{"unschedulable":true},"status"`), want: "kubectl uncordon b"},
		"no driver":            {change: func(o map[string]string) { delete(o, "/apis/storage.k8s.io/v1/csinodes/b") }, want: "is not registered on the node"},
		"unknown class alone":  {change: func(o map[string]string) { delete(o, snapshotClasses) }, options: move.Options{To: "b", SnapshotClass: "snap"}, want: `--snapshot-class "snap" is not a VolumeSnapshotClass of d`},
		"two snapshot classes": {change: replaced(snapshotClasses, `"e"`, `"d"`), want: "--snapshot-class"},
		"unknown class":        {options: move.Options{To: "b", SnapshotClass: "other"}, want: `--snapshot-class "other" is not a VolumeSnapshotClass of d`},
		"bare pod":             {change: changedPod(`"controller":true`, `"controller":false`), want: "pod ns/db-0, which uses the claim, has no controller"},
		"DaemonSet":            {change: changedPod("StatefulSet", "DaemonSet"), want: "belongs to DaemonSet db"},
		"static pod":           {change: changedPod(`"uid"`, `"annotations":{"kubernetes.io/config.mirror":"x"},"uid"`), want: "is a static pod of node a"},
		"pod elsewhere":        {change: changedPod(`"nodeName":"a"`, `"nodeName":"c"`), want: "is on node c"},
		"tolerates a cordon":   {change: changedPod(`"nodeName"`, `"tolerations":[{"operator":"Exists"}],"nodeName"`), want: "tolerates the taint"},
		"node selector":        {change: changedPod(`"nodeName"`, `"nodeSelector":{"zone":"y"},"nodeName"`), want: "cannot run on node b"},
		"taint":                {change: replaced(nodeB, `"status":{`, `"spec":{"taints":[{"key":"gpu","effect":"NoSchedule"}]},"status":{`), want: "does not tolerate the taint gpu"},
		"other pinned claim":   {change: changedPod(`[{"name":"v"`, `[{"name":"w","persistentVolumeClaim":{"claimName":"pinned"}},{"name":"v"`), want: "also uses claim pinned"},
		"missing right":        {change: replaced("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", "true", "false"), want: "needs the right to create pods/eviction in the namespace ns"},
	} {
		t.Run(name, func(t *testing.T) {
			answers := objects()
			if tc.change != nil {
				tc.change(answers)
			}
			if tc.options.To == "" {
				tc.options.To = "b"
			}
			if _, err := plan(t, answers, drivers(), tc.options); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want an error that contains %q", err, tc.want)
			}
		})
	}
	full := drivers()
	full.Pools[1].Problem = "not open"
	if _, err := plan(t, objects(), full, move.Options{To: "b"}); err == nil || !strings.Contains(err.Error(), "has no open pool") {
		t.Errorf("got %v for a node whose pool is not open, want an error", err)
	}
	full.Pools[1] = status.Pool{Name: "fast", Node: "b", RoomBytes: 3 << 30, LargestBytes: 1 << 29}
	if _, err := plan(t, objects(), full, move.Options{To: "b"}); err == nil || !strings.Contains(err.Error(), "has room for a volume of 512 MiB") {
		t.Errorf("got %v for a node without room, want an error with its room", err)
	}
}

// TestPlanDrain: each volume is moved to the node with the most room that is left, and a volume of another kind cannot be moved.
func TestPlanDrain(t *testing.T) {
	answers, report := objects(), drivers()
	report.Pools = append(report.Pools, status.Pool{Name: "fast", Node: "c", RoomBytes: 5 << 29, LargestBytes: 5 << 29})
	answers["/api/v1/nodes/c"] = strings.ReplaceAll(answers["/api/v1/nodes/b"], `"b"`, `"c"`)
	answers["/apis/storage.k8s.io/v1/csinodes/c"] = answers["/apis/storage.k8s.io/v1/csinodes/b"]
	var volumes []string
	for i, kind := range []string{"image", "image", "disk"} {
		claim, pv := fmt.Sprintf("data-%d", i), fmt.Sprintf("pv-%d", 10+i)
		id := fmt.Sprintf("%s:fast.01234567:pvc-%d", kind, i)
		answers["/api/v1/namespaces/ns/persistentvolumeclaims/"+claim] = strings.NewReplacer(`"name":"data"`, `"name":"`+claim+`"`, `"pv"`, `"`+pv+`"`).Replace(answers["/api/v1/namespaces/ns/persistentvolumeclaims/data"])
		volume := strings.NewReplacer(`"pv"`, `"`+pv+`"`, handle, id, `"name":"data"`, `"name":"`+claim+`"`).Replace(answers["/api/v1/persistentvolumes/pv"])
		answers["/api/v1/persistentvolumes/"+pv] = volume
		volumes = append(volumes, strings.TrimSuffix(volume, "}")+`,"status":{"phase":"Bound"}}`)
		report.Volumes = append(report.Volumes, status.Volume{ID: id, Node: "a", SizeBytes: 1 << 30})
	}
	const configMaps = "/api/v1/namespaces/trivet-system/configmaps"
	answers["/api/v1/namespaces/ns/persistentvolumeclaims/lost"] = `{"metadata":{"namespace":"ns","name":"lost","uid":"l"}}`
	answers[configMaps+"/trivet-move-l"] = `{"metadata":{"name":"trivet-move-l"},"data":{"state":"{\"id\":\"1\",\"namespace\":\"ns\",\"claim\":\"lost\",\"uid\":\"l\",\"from\":\"a\",\"to\":\"c\",\"step\":\"swap\"}"}}`
	answers[configMaps] = `{"metadata":{},"items":[{"metadata":{"name":"trivet-move-x"},"data":{"state":"{"}},` + answers[configMaps+"/trivet-move-l"] + `]}`
	const copied = "/api/v1/namespaces/ns/persistentvolumeclaims/copy"
	answers[copied] = `{"metadata":{"namespace":"ns","name":"copy","uid":"k","labels":{"csi.trivet.dev/protect":"x"}}}`
	volume := strings.NewReplacer(`"pv"`, `"pv-copy"`, handle, handle+"9", `"name":"data"`, `"name":"copy"`).Replace(answers["/api/v1/persistentvolumes/pv"])
	answers["/api/v1/persistentvolumes"] = `{"metadata":{},"items":[` + strings.Join(append(volumes, strings.TrimSuffix(volume, "}")+`,"status":{"phase":"Bound"}}`), ",") + `]}`
	report.Volumes = append(report.Volumes, status.Volume{ID: handle + "9", Node: "a", CopyOf: "w", SizeBytes: 1 << 30})
	d, err := move.PlanDrain(t.Context(), connect(t, answers), report, "a", move.Options{Transfers: isImage})
	if err != nil || len(d.Moves) != 3 || len(d.Unmovable) != 1 {
		t.Fatalf("got %+v, %v, want three moves and one claim that cannot be moved", d, err)
	}
	if begun := d.Moves[0]; begun.Name() != "ns/lost" || begun.Begun() == "" || begun.Destination() != "c" {
		t.Errorf("got %+v, want first the move that has begun, of a claim without a PersistentVolume", begun)
	}
	if first, second := d.Moves[1].Plan.To, d.Moves[2].Plan.To; first != "b" || second != "c" {
		t.Errorf("got the nodes %s and %s, want b, and then c, which has more room than what is left on b", first, second)
	}
	if len(d.Copies) != 1 || d.Copies[0] != "ns/copy" {
		t.Errorf("got the copies %q, want ns/copy", d.Copies)
	}
	if u := d.Unmovable[0]; u.Claim != "ns/data-2" || !strings.Contains(u.Reason.Error(), "backend disk cannot send") {
		t.Errorf("got %+v, want ns/data-2 because of its backend", u)
	}
	report.Pools[1].RoomBytes, report.Pools[2].RoomBytes = 3<<29, 1<<29
	d, err = move.PlanDrain(t.Context(), connect(t, answers), report, "a", move.Options{Transfers: isImage})
	if err != nil || len(d.Moves) != 2 || len(d.Unmovable) != 2 {
		t.Errorf("with room for one volume: got %+v, %v, want the move that has begun and one other", d, err)
	}
}
