package move

import (
	"path"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/cluster/kube"
	"github.com/trivet-csi/trivet/cluster/status"
)

// TestSchedule: each period that a CronJob can express has a schedule, which depends on the claim, and others are refused.
func TestSchedule(t *testing.T) {
	for every, want := range map[time.Duration]string{
		time.Minute: "0-59/1 * * * *", 15 * time.Minute: "13-59/15 * * * *", 30 * time.Minute: "28-59/30 * * * *",
		time.Hour: "28 0-23/1 * * *", 6 * time.Hour: "28 5-23/6 * * *", 24 * time.Hour: "28 11 * * *",
	} {
		if got, err := schedule(every, "u"); err != nil || got != want {
			t.Errorf("%v: got %q, %v, want %q", every, got, err, want)
		}
	}
	one, err1 := schedule(time.Hour, "one")
	two, err2 := schedule(time.Hour, "two")
	if err1 != nil || err2 != nil || one == two {
		t.Errorf("got %q, %v and %q, %v, want different minutes for two claims", one, err1, two, err2)
	}
	for _, every := range []time.Duration{0, -time.Hour, time.Second, 90 * time.Second, 7 * time.Minute, 45 * time.Minute, 90 * time.Minute, 5 * time.Hour, 24*time.Hour + time.Minute, 48 * time.Hour} {
		if got, err := schedule(every, "u"); err == nil || !strings.Contains(err.Error(), "a CronJob cannot run with this period") {
			t.Errorf("%v: got %q, %v, want an error", every, got, err)
		}
	}
}

// TestPeriod: a period is printed without zero units.
func TestPeriod(t *testing.T) {
	for every, want := range map[time.Duration]string{10 * time.Minute: "10m", time.Hour: "1h", 24 * time.Hour: "24h", 30 * time.Minute: "30m"} {
		if got := Period(every); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

// TestNextCopy: a copy that is not complete is continued if it is still useful. Others that are not complete are deleted.
func TestNextCopy(t *testing.T) {
	complete := func(number int) protectedCopy {
		return protectedCopy{number: number, complete: true, handle: "v", node: "b"}
	}
	begun := protectedCopy{number: 3, handle: "v", node: "b"}
	changed := func(change func(*protectedCopy)) protectedCopy {
		c := begun
		change(&c)
		return c
	}
	for name, tc := range map[string]struct {
		all         []protectedCopy
		number      int
		superfluous []int
	}{
		"first":                  {nil, 1, nil},
		"after a complete one":   {[]protectedCopy{complete(1), complete(2)}, 3, nil},
		"continued":              {[]protectedCopy{complete(2), begun}, 3, nil},
		"only a snapshot":        {[]protectedCopy{complete(2), changed(func(c *protectedCopy) { c.node = "" })}, 3, nil},
		"another volume":         {[]protectedCopy{complete(2), changed(func(c *protectedCopy) { c.handle = "w" })}, 4, []int{3}},
		"another node":           {[]protectedCopy{complete(2), changed(func(c *protectedCopy) { c.node = "c" })}, 4, []int{3}},
		"without its node":       {[]protectedCopy{complete(2), changed(func(c *protectedCopy) { c.node, c.stray = "", true })}, 4, []int{3}},
		"being deleted":          {[]protectedCopy{complete(2), changed(func(c *protectedCopy) { c.ending = true })}, 4, []int{3}},
		"not complete and older": {[]protectedCopy{begun, complete(4)}, 5, []int{3}},
	} {
		number, superfluous := nextCopy(tc.all, "v", "b")
		if number != tc.number || !slices.Equal(superfluous, tc.superfluous) {
			t.Errorf("%s: got copy %d, and %v to delete, want %d and %v", name, number, superfluous, tc.number, tc.superfluous)
		}
	}
}

// TestOldCopies: the newest complete copies of the volume on other nodes than its own are kept. One that another run has begun since is
// not deleted.
func TestOldCopies(t *testing.T) {
	all := []protectedCopy{
		{number: 1, complete: true, handle: "v"},
		{number: 2, complete: true, handle: "v"},
		{number: 3, handle: "v"},
		{number: 4, complete: true, handle: "w"},
		{number: 5, complete: true, handle: "v", ending: true},
		{number: 6, complete: true, handle: "v"},
		{number: 7, complete: true, handle: "v", node: "a"},
		{number: 8, complete: true, handle: "w"},
	}
	for keep, want := range map[int][]int{1: {1, 2, 3, 4, 5, 7}, 2: {1, 3, 4, 5, 7}, 9: {3, 4, 5, 7}} {
		if got := oldCopies(all, 7, "v", "a", keep); !slices.Equal(got, want) {
			t.Errorf("keep %d: got %v, want %v", keep, got, want)
		}
	}
}

// TestCronJob: the CronJob runs this program for the claim with the UID, in a pod without privileges.
func TestCronJob(t *testing.T) {
	o := ProtectOptions{Options: Options{Namespace: "ns", ClaimName: "data", To: "b", SnapshotClass: "snap"}, Every: time.Hour, Kept: 3}
	spec := cronJob("7 * * * *", o, "u", "account", "image:1", map[string]any{protectLabel: "u"})
	if spec["concurrencyPolicy"] != "Forbid" || spec["schedule"] != "7 * * * *" {
		t.Errorf("got %v, want the schedule, and one Job at a time", spec)
	}
	pod := spec["jobTemplate"].(map[string]any)["spec"].(map[string]any)["template"].(map[string]any)["spec"].(map[string]any)
	container := pod["containers"].([]any)[0].(map[string]any)
	want := []any{"/usr/local/bin/kubectl-trivet", "protect", "--namespace", "ns", "data", "--once", "u", "--on", "b", "--keep", "3", "--snapshot-class", "snap"}
	if pod["serviceAccountName"] != "account" || container["image"] != "image:1" || !reflect.DeepEqual(container["command"], want) {
		t.Errorf("got %v, want the image, the account and the command %v", pod, want)
	}
	if len(jobName("01234567-89ab-cdef-0123-456789abcdef")) > 52 {
		t.Error("the name of the CronJob is longer than 52 characters")
	}
}

const (
	cronJobPath = "/apis/batch/v1/namespaces/trivet-system/cronjobs/trivet-protect-u"
	jobPath     = "/apis/batch/v1/namespaces/trivet-system/jobs/run"
	keptPath    = "/api/v1/namespaces/ns/persistentvolumeclaims/trivet-copy-u-4"
	bindingPath = "/apis/rbac.authorization.k8s.io/v1/namespaces/ns/rolebindings/trivet-system:account"
)

// protected is begin with a protection of the claim, and without a move.
func protected(t *testing.T) (*apiServer, *Mover) {
	t.Helper()
	s, open := begin(t, "old")
	delete(s.objects, recordPath)
	s.objects[cronJobPath] = object(t, `{"metadata":{"namespace":"trivet-system","name":"trivet-protect-u","labels":{"csi.trivet.dev/protect":"u"},"annotations":{"csi.trivet.dev/protected-claim":"ns/data"}},
		"spec":{"jobTemplate":{"spec":{"template":{"spec":{"serviceAccountName":"account"}}}}}}`)
	s.objects[jobPath] = object(t, `{"metadata":{"namespace":"trivet-system","name":"run"}}`)
	s.objects[keptPath] = object(t, `{"metadata":{"namespace":"ns","name":"trivet-copy-u-4"},"status":{"phase":"Bound"}}`)
	s.objects[bindingPath] = object(t, `{"metadata":{"namespace":"ns","name":"trivet-system:account"}}`)
	for _, list := range []string{path.Dir(cronJobPath), path.Dir(jobPath), path.Dir(keptPath), "/apis/snapshot.storage.k8s.io/v1/namespaces/ns/volumesnapshots"} {
		s.objects[list] = object(t, `{"metadata":{},"items":[]}`)
	}
	m := open()
	m.Timeout = time.Minute
	return s, m
}

// TestStopProtection: the end of a protection deletes its copies and its objects, also if the claim was deleted, but nothing while a move
// or a recovery is not complete.
func TestStopProtection(t *testing.T) {
	s, m := protected(t)
	all, err := Protections(t.Context(), m.api, "ns", "data")
	if err != nil || len(all) != 1 {
		t.Fatalf("got %+v, %v, want one protection", all, err)
	}
	s.objects[recordPath] = object(t, `{"metadata":{"name":"trivet-move-u"}}`)
	if err := StopProtection(t.Context(), m.api, all[0], m.Options); err == nil || !strings.Contains(err.Error(), "ConfigMap trivet-system/trivet-move-u") || s.version != 0 {
		t.Errorf("got %v and %d writes, want that the recovery must be completed first", err, s.version)
	}
	delete(s.objects, recordPath)
	delete(s.objects, claimPath)
	if err := StopProtection(t.Context(), m.api, all[0], m.Options); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{cronJobPath, jobPath, keptPath, bindingPath} {
		if _, left := s.objects[path]; left {
			t.Errorf("got %s, want that it is deleted", path)
		}
	}
}

// TestStopProtectionInterrupted: the protection is found again until everything else is deleted.
func TestStopProtectionInterrupted(t *testing.T) {
	s, m := protected(t)
	delete(s.objects, path.Dir(keptPath))
	if err := StopProtection(t.Context(), m.api, Protection{Claim: "ns/data", UID: "u", job: "trivet-protect-u", account: "account"}, m.Options); err == nil {
		t.Error("got no error, want that the copies cannot be listed")
	}
	suspended, _ := s.objects[cronJobPath]["spec"].(map[string]any)["suspend"].(bool)
	if _, running := s.objects[jobPath]; running || !suspended {
		t.Errorf("got a Job: %t, suspended: %t, want a suspended CronJob without Jobs", running, suspended)
	}
	if all, err := Protections(t.Context(), m.api, "ns", "data"); err != nil || len(all) != 1 {
		t.Errorf("got %+v, %v, want the protection", all, err)
	}
}

// TestOnlyData: the copies may be the only data while the node of the claim is lost.
func TestOnlyData(t *testing.T) {
	s, m := protected(t)
	s.objects[pvPath]["spec"].(map[string]any)["nodeAffinity"] = object(t, `{"required":{"nodeSelectorTerms":[{"matchExpressions":[{"key":"csi.trivet.dev/node","operator":"In","values":["a"]}]}]}}`)
	p := Protection{Claim: "ns/data", UID: "u"}
	for status, want := range map[string]string{"": "does not exist", "Unknown": "is not ready", "True": ""} {
		delete(s.objects, "/api/v1/nodes/a")
		if status != "" {
			s.objects["/api/v1/nodes/a"] = object(t, `{"metadata":{"name":"a"},"status":{"conditions":[{"type":"Ready","status":"`+status+`"}]}}`)
		}
		reason, err := OnlyData(t.Context(), m.api, p, m.Options)
		if err != nil || (reason == nil) != (want == "") || reason != nil && !strings.Contains(reason.Error(), want) {
			t.Errorf("%q: got %v, %v, want %q", status, reason, err, want)
		}
	}
	delete(s.objects, pvPath)
	if reason, err := OnlyData(t.Context(), m.api, p, m.Options); err != nil || reason == nil {
		t.Errorf("got %v, %v without a PersistentVolume, want a reason", reason, err)
	}
	delete(s.objects, claimPath)
	if reason, err := OnlyData(t.Context(), m.api, p, m.Options); err != nil || reason != nil {
		t.Errorf("got %v, %v for a claim that was deleted, want no reason", reason, err)
	}
}

// TestCheckUnchanged: a run ends if the claim gets another volume or is moved meanwhile.
func TestCheckUnchanged(t *testing.T) {
	s, m := protected(t)
	v, err := m.view(t.Context(), "pv")
	if err != nil {
		t.Fatal(err)
	}
	p := Plan{Volume: v}
	if err := m.checkUnchanged(t.Context(), p); err != nil {
		t.Errorf("got %v, want no error", err)
	}
	merge(s.objects[claimPath]["metadata"].(map[string]any), kube.Object{"annotations": map[string]any{moveLabel: "1 swap"}})
	if err := m.checkUnchanged(t.Context(), p); err == nil || !strings.Contains(err.Error(), "is being moved or recovered (1 swap)") {
		t.Errorf("got %v, want that the claim is being moved", err)
	}
	delete(s.objects[claimPath]["metadata"].(map[string]any), "annotations")
	s.objects[pvPath]["spec"].(map[string]any)["csi"].(map[string]any)["volumeHandle"] = "new"
	if err := m.checkUnchanged(t.Context(), p); err == nil || !strings.Contains(err.Error(), "has the volume new now") {
		t.Errorf("got %v, want that the claim has another volume", err)
	}
}

// TestBind: a RoleBinding that exists is used only if it gives the same rights to the same ServiceAccount.
func TestBind(t *testing.T) {
	s, m := protected(t)
	delete(s.objects, bindingPath)
	account := kube.Meta{Namespace: "trivet-system", Name: "account"}
	bind := func() error {
		return m.api.Bind(t.Context(), "ns", "trivet-system:account", map[string]any{}, "trivet-system:account", account)
	}
	for range 2 {
		if err := bind(); err != nil {
			t.Fatal(err)
		}
	}
	account.Name = "other"
	if err := bind(); err == nil || !strings.Contains(err.Error(), "it exists with the role") {
		t.Errorf("got %v for another ServiceAccount, want an error", err)
	}
}

// byClass is protected, with the PersistentVolume on node a, a class with the parameter protect, the nodes b and c, and the driver's
// pod. The CronJob is deleted.
func byClass(t *testing.T) (*apiServer, ClassProtector, status.Report) {
	t.Helper()
	s, m := protected(t)
	const handle = "loop:fast.01234567:pvc-1"
	delete(s.objects, cronJobPath)
	delete(s.objects, keptPath)
	delete(s.objects, bindingPath)
	s.objects[claimPath]["spec"] = map[string]any{"volumeName": "pv", "storageClassName": "fast"}
	pv := s.objects[pvPath]["spec"].(map[string]any)
	driver := pv["csi"].(map[string]any)["driver"].(string)
	pv["csi"].(map[string]any)["volumeHandle"] = handle
	pv["nodeAffinity"] = object(t, `{"required":{"nodeSelectorTerms":[{"matchExpressions":[{"key":"csi.trivet.dev/node","operator":"In","values":["a"]}]}]}}`)
	s.objects["/apis/storage.k8s.io/v1/storageclasses/fast"] = object(t, `{"metadata":{"name":"fast"},"provisioner":"`+driver+`","parameters":{"protect":"15m"}}`)
	for _, node := range []string{"b", "c"} {
		s.objects["/api/v1/nodes/"+node] = object(t, `{"metadata":{"name":"`+node+`"},"spec":{},"status":{"conditions":[{"type":"Ready","status":"True"}]}}`)
		s.objects["/apis/storage.k8s.io/v1/csinodes/"+node] = object(t, `{"metadata":{"name":"`+node+`"},"spec":{"drivers":[{"name":"`+driver+`","nodeID":"`+node+`"}]}}`)
	}
	for path, text := range map[string]string{
		"/apis/snapshot.storage.k8s.io/v1/volumesnapshotclasses/snap": `{"metadata":{"name":"snap"},"driver":"` + driver + `","deletionPolicy":"Delete"}`,
		"/api/v1/namespaces/trivet-system/serviceaccounts/account":    `{"metadata":{"namespace":"trivet-system","name":"account"}}`,
		"/api/v1/namespaces/trivet-system/pods/old":                   `{"metadata":{"name":"old","uid":"1","labels":{"app.kubernetes.io/component":"controller"}},"spec":{"nodeName":"a","containers":[{"name":"trivet","image":"image:1"}]}}`,
		"/api/v1/namespaces/trivet-system/pods/own":                   `{"metadata":{"name":"own","uid":"2","labels":{"app.kubernetes.io/component":"controller"}},"spec":{"nodeName":"b","containers":[{"name":"trivet","image":"image:2"}]}}`,
	} {
		s.objects[path] = object(t, text)
	}
	for _, list := range []string{"/apis/snapshot.storage.k8s.io/v1/volumesnapshotclasses", "/api/v1/namespaces/trivet-system/serviceaccounts", "/api/v1/namespaces/trivet-system/pods"} {
		s.objects[list] = object(t, `{"metadata":{},"items":[]}`)
	}
	delete(s.objects, jobPath)
	report := status.Report{
		Driver: driver, Volumes: []status.Volume{{ID: handle, Pool: "fast", Node: "a", SizeBytes: 1 << 30}},
		Pools: []status.Pool{{Name: "fast", Node: "a", RoomBytes: 9 << 30}, {Name: "fast", Node: "b", RoomBytes: 3 << 30}, {Name: "fast", Node: "c", RoomBytes: 4 << 30}},
	}
	return s, ClassProtector{Cluster: m.api, PodUID: "2", Transfers: func(string) bool { return true }}, report
}

// TestProtectByClass: the node with the most room that is not the volume's gets the copies, until it is lost. The CronJob runs the
// image of the driver, and its copies belong to the claim.
func TestProtectByClass(t *testing.T) {
	s, protector, report := byClass(t)
	protect := func() error {
		return protector.Protect(t.Context(), func() status.Report { return report }, []kube.ProtectedClaim{{Namespace: "ns", Name: "data", UID: "u", Class: "fast", Every: "15m"}})[0]
	}
	want := func(node, image string) {
		t.Helper()
		all, err := Protections(t.Context(), protector.Cluster, "ns", "data")
		if err != nil || len(all) != 1 || all[0].Node != node || all[0].image != image || all[0].Every != "15m" || all[0].Keep != 2 || all[0].Class != "fast" {
			t.Fatalf("got %+v, %v, want one protection on node %s with %s", all, err, node, image)
		}
	}
	if err := protect(); err != nil {
		t.Fatal(err)
	}
	want("c", "image:2")
	if _, bound := s.objects[bindingPath]; !bound {
		t.Error("got no RoleBinding in the namespace of the claim")
	}
	written := s.version
	if err := protect(); err != nil || s.version != written {
		t.Errorf("got %v and %d writes for a protected claim, want none", err, s.version-written)
	}
	delete(s.objects, bindingPath)
	if err := protect(); err != nil || s.objects[bindingPath] == nil {
		t.Errorf("got %v, want that a missing RoleBinding is created again", err)
	}
	protector.PodUID = "1"
	if err := protect(); err != nil {
		t.Error(err)
	}
	want("c", "image:1")
	s.objects["/api/v1/nodes/c"]["spec"] = map[string]any{"taints": []any{map[string]any{"key": kube.OutOfService}}}
	report.Pools[2].Problem = "the node does not answer"
	report.Pools[1].RoomBytes = 3 << 30
	if err := protect(); err != nil {
		t.Error(err)
	}
	want("b", "image:1")
	report.Pools = report.Pools[:1]
	s.objects["/api/v1/nodes/b"]["spec"] = s.objects["/api/v1/nodes/c"]["spec"]
	if err := protect(); err == nil || !strings.Contains(err.Error(), "no other node has a pool") {
		t.Errorf("got %v without another node, want an error", err)
	}
}

// TestProtectByClassNotChanged: the protection of a user is not changed, nor is a claim protected that cannot be.
func TestProtectByClassNotChanged(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(s *apiServer, report *status.Report)
		want   string
	}{
		"by a user": {change: func(s *apiServer, _ *status.Report) {
			s.objects[cronJobPath] = object(t, `{"metadata":{"name":"trivet-protect-u","labels":{"csi.trivet.dev/protect":"u"},"annotations":{"csi.trivet.dev/copies-on":"gone"}}}`)
		}},
		"deleted":       {change: func(s *apiServer, _ *status.Report) { delete(s.objects, claimPath) }},
		"created again": {change: func(s *apiServer, _ *status.Report) { s.objects[claimPath]["metadata"].(map[string]any)["uid"] = "v" }},
		"moved": {change: func(s *apiServer, _ *status.Report) {
			merge(s.objects[claimPath]["metadata"].(map[string]any), kube.Object{"annotations": map[string]any{moveLabel: "1 swap"}})
		}, want: "is being moved or recovered (1 swap)"},
		"several nodes": {change: func(s *apiServer, _ *status.Report) {
			s.objects[claimPath]["spec"].(map[string]any)["accessModes"] = []any{"ReadWriteMany"}
		}, want: "ReadWriteMany"},
		"no room": {change: func(_ *apiServer, r *status.Report) { r.Pools[1].RoomBytes, r.Pools[2].RoomBytes = 1, 2 }, want: `node "c" has room for 2`},
	} {
		t.Run(name, func(t *testing.T) {
			s, protector, report := byClass(t)
			tc.change(s, &report)
			err := protector.Protect(t.Context(), func() status.Report { return report }, []kube.ProtectedClaim{{Namespace: "ns", Name: "data", UID: "u", Class: "fast", Every: "15m"}})[0]
			if (tc.want == "") != (err == nil) || err != nil && !strings.Contains(err.Error(), tc.want) || s.version != 0 {
				t.Errorf("got %v and %d writes, want the error %q and none", err, s.version, tc.want)
			}
		})
	}
}

// TestEndByClass: a protection by a class ends with its claim, and not before, because the class would create it again.
func TestEndByClass(t *testing.T) {
	s, protector, report := byClass(t)
	if err := protector.Protect(t.Context(), func() status.Report { return report }, []kube.ProtectedClaim{{Namespace: "ns", Name: "data", UID: "u", Class: "fast", Every: "15m"}})[0]; err != nil {
		t.Fatal(err)
	}
	all, err := Protections(t.Context(), protector.Cluster, "ns", "data")
	if err != nil || len(all) != 1 {
		t.Fatalf("got %+v, %v, want one protection", all, err)
	}
	if err := StopProtection(t.Context(), protector.Cluster, all[0], Options{}); err == nil || !strings.Contains(err.Error(), "which would protect it again") {
		t.Errorf("got %v, want that the class protects the claim", err)
	}
	job := kube.CronJob{Metadata: kube.Meta{Name: "trivet-protect-u", Labels: map[string]string{protectLabel: "u"}}}
	if err := protector.End(t.Context(), []kube.CronJob{job}); err != nil || s.objects[cronJobPath] == nil {
		t.Errorf("got %v, want that the protection of an existing claim stays", err)
	}
	delete(s.objects, claimPath)
	if err := protector.End(t.Context(), []kube.CronJob{job}); err != nil || s.objects[cronJobPath] != nil || s.objects[bindingPath] != nil {
		t.Errorf("got %v, want that the CronJob and the RoleBinding are deleted", err)
	}
}

// TestUnbindMeanwhile: the RoleBinding is created again if another claim of the namespace was protected while it was deleted.
func TestUnbindMeanwhile(t *testing.T) {
	s, protector, report := byClass(t)
	if err := protector.Protect(t.Context(), func() status.Report { return report }, []kube.ProtectedClaim{{Namespace: "ns", Name: "data", UID: "u", Class: "fast", Every: "15m"}})[0]; err != nil {
		t.Fatal(err)
	}
	ended := Protection{Claim: "ns/ended", UID: "v", job: "trivet-protect-v", account: "account"}
	for _, tc := range []struct {
		claim string // of the protection that exists
		bound bool
	}{{"ns/data", true}, {"other/data", false}} {
		s.objects[cronJobPath]["metadata"].(map[string]any)["annotations"].(map[string]any)[claimAnnotation] = tc.claim
		if err := unbind(t.Context(), protector.Cluster, []Protection{ended}, ended); err != nil || (s.objects[bindingPath] != nil) != tc.bound {
			t.Errorf("%s: got %v and the RoleBinding %v, want one: %t", tc.claim, err, s.objects[bindingPath], tc.bound)
		}
	}
}
