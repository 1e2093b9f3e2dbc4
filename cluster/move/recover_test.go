package move_test

import (
	"strings"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/cluster/move"
	"github.com/trivet-csi/trivet/cluster/status"
)

const copyHandle = "image:fast.89abcdef:pvc-c"

// lostObjects are the answers of an API server with a claim whose node a is lost, and its copy c1 on node b.
func lostObjects() map[string]string {
	answers := objects()
	answers["/api/v1/nodes/a"] = `{"metadata":{"name":"a"},"spec":{"taints":[{"key":"node.kubernetes.io/out-of-service","effect":"NoExecute"}]},"status":{"conditions":[{"type":"Ready","status":"Unknown"}]}}`
	answers["/api/v1/namespaces/ns/pods"] = `{"metadata":{},"items":[` + pod(`"nodeName":"a"`, `"nodeName":""`) + `]}`
	answers["/apis/storage.k8s.io/v1/volumeattachments"] = `{"metadata":{},"items":[]}`
	answers["/api/v1/namespaces/ns/persistentvolumeclaims"] = `{"metadata":{},"items":[{"metadata":{"namespace":"ns","name":"c1","uid":"c","creationTimestamp":"2026-01-02T01:00:00Z","labels":{"csi.trivet.dev/protect":"u"}},"spec":{"volumeName":"pv-c"},"status":{"phase":"Bound"}}]}`
	answers["/api/v1/persistentvolumes/pv-c"] = `{"metadata":{"name":"pv-c"},"spec":{"claimRef":{"namespace":"ns","name":"c1","uid":"c"},"csi":{"driver":"d","volumeHandle":"` + copyHandle + `"},
		"nodeAffinity":{"required":{"nodeSelectorTerms":[{"matchExpressions":[{"key":"csi.trivet.dev/node","operator":"In","values":["b"]}]}]}}}}`
	return answers
}

// lostReport is the report of the drivers without node a.
func lostReport(taken time.Time) status.Report {
	return status.Report{Driver: "d", Volumes: []status.Volume{{ID: copyHandle, Node: "b", CopyOf: handle, Snapshotted: taken}}}
}

func planRecovery(t *testing.T, answers map[string]string, report status.Report, name string) (move.Recovery, error) {
	t.Helper()
	m, err := move.New(t.Context(), connect(t, answers), move.Options{Namespace: "ns", ClaimName: "data", Transfers: isImage, Recover: true})
	if err != nil {
		return move.Recovery{}, err
	}
	return m.PlanRecovery(t.Context(), report, name)
}

// TestPlanRecovery: the newest verified copy is chosen, or the one with a name. A node without an object is lost, too.
func TestPlanRecovery(t *testing.T) {
	taken := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	answers, report := lostObjects(), lostReport(taken)
	list := answers["/api/v1/namespaces/ns/persistentvolumeclaims"]
	newer := strings.NewReplacer("T01", "T02", "c1", "c2", `"uid":"c"`, `"uid":"c2"`, "pv-c", "pv-c2", copyHandle, copyHandle+"2")
	item := strings.TrimSuffix(strings.TrimPrefix(list, `{"metadata":{},"items":[`), `]}`)
	answers["/api/v1/namespaces/ns/persistentvolumeclaims"] = `{"metadata":{},"items":[` + item + "," + newer.Replace(item) + `]}`
	answers["/api/v1/persistentvolumes/pv-c2"] = newer.Replace(answers["/api/v1/persistentvolumes/pv-c"])
	report.Volumes = append(report.Volumes, status.Volume{ID: copyHandle + "2", Node: "b", CopyOf: handle, Snapshotted: taken.Add(time.Hour)})
	for name, want := range map[string]string{"": "c2", "c1": "c1"} {
		r, err := planRecovery(t, answers, report, name)
		if err != nil || r.From != "a" || r.Copy.Claim != want || r.Copy.Node != "b" || r.Copy.Snapshotted.Before(taken) {
			t.Errorf("copy %q: got %+v, %v, want %s on node b", name, r, err, want)
		}
	}
	report.Volumes[1].CopyOf = ""
	if r, err := planRecovery(t, answers, report, ""); err == nil || !strings.Contains(err.Error(), "copy c2 was used") || !strings.Contains(err.Error(), "--copy c1") {
		t.Errorf("got %+v, %v, want that c2, which is newer, cannot be used, and c1 must be named", r, err)
	}
	if r, err := planRecovery(t, answers, report, "c1"); err != nil || r.Copy.Claim != "c1" || len(r.Newer) != 1 || r.Newer[0].Claim != "c2" {
		t.Errorf("got %+v, %v, want c1, and that c2 is newer", r, err)
	}
	report.Volumes[1].CopyOf = handle
	delete(answers, "/api/v1/nodes/a")
	if r, err := planRecovery(t, answers, report, ""); err != nil || r.Copy.Claim != "c2" {
		t.Errorf("got %+v, %v for a node that does not exist, want c2", r, err)
	}
}

// TestRecoveryRefusals: a claim whose node may still write is not recovered, and neither is one whose copy is not proven.
func TestRecoveryRefusals(t *testing.T) {
	const nodeA, pods, attachments, claims, pvC = "/api/v1/nodes/a", "/api/v1/namespaces/ns/pods", "/apis/storage.k8s.io/v1/volumeattachments", "/api/v1/namespaces/ns/persistentvolumeclaims", "/api/v1/persistentvolumes/pv-c"
	replaced := func(path string, change ...string) func(map[string]string, *status.Report) {
		return func(o map[string]string, _ *status.Report) { o[path] = strings.NewReplacer(change...).Replace(o[path]) }
	}
	reported := func(change func(*status.Volume)) func(map[string]string, *status.Report) {
		return func(_ map[string]string, r *status.Report) { change(&r.Volumes[0]) }
	}
	for name, tc := range map[string]struct {
		change func(map[string]string, *status.Report)
		copy   string
		want   string
	}{
		"ready, lost disk":  {change: replaced(nodeA, "Unknown", "True"), want: "but no driver reports its volume " + handle},
		"without the taint": {change: replaced(nodeA, "out-of-service", "unreachable"), want: "kubectl taint node a node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"},
		"ready with the taint": {change: func(o map[string]string, r *status.Report) {
			o[nodeA] = strings.Replace(o[nodeA], "Unknown", "True", 1)
			r.Volumes = append(r.Volumes, status.Volume{ID: handle, Node: "a"})
		}, want: "nothing is lost"},
		"pod on the node":     {change: replaced(pods, `"nodeName":""`, `"nodeName":"a"`), want: "kubectl delete pod -n ns db-0 --force"},
		"attached":            {change: replaced(attachments, `[]`, `[{"metadata":{"name":"va"},"spec":{"nodeName":"a","source":{"persistentVolumeName":"pv"}}}]`), want: "kubectl get volumeattachment va"},
		"no copy":             {change: replaced(claims, "Bound", "Pending"), want: "claim ns/data has no copy with which"},
		"unknown copy":        {copy: "other", want: `has no copy "other"`},
		"foreign volume":      {change: replaced(pvC, `"uid":"c"`, `"uid":"x"`), want: `belongs to claim ns/c1 with the UID "x"`},
		"other driver":        {change: replaced(pvC, `"d"`, `"e"`), want: `has the driver "e"`},
		"not reported":        {change: reported(func(v *status.Volume) { v.ID = "another" }), want: "no driver reports its volume"},
		"used":                {change: reported(func(v *status.Volume) { v.CopyOf = "" }), want: "was used by a pod or changed"},
		"of another volume":   {change: reported(func(v *status.Volume) { v.CopyOf = "image:fast.01234567:pvc-9" }), want: "is a copy of the volume image:fast.01234567:pvc-9"},
		"without a time":      {change: reported(func(v *status.Volume) { v.Snapshotted = time.Time{} }), want: "reports it without a time"},
		"reported by another": {change: reported(func(v *status.Volume) { v.Node = "c" }), want: `driver of node "c"`},
		"copy on the same node": {change: func(o map[string]string, r *status.Report) {
			o[pvC] = strings.Replace(o[pvC], `["b"]`, `["a"]`, 1)
			r.Volumes[0].Node = "a"
		}, want: "already on this node"},
		"copy on a cordoned node": {change: replaced("/api/v1/nodes/b", `"status"`, `"spec":{"unschedulable":true},"status"`), want: "kubectl uncordon b"},
		"pod uses the copy":       {change: replaced(pods, `"claimName":"data"`, `"claimName":"c1"`), want: "uses the copy c1"},
		"missing right":           {change: replaced("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", "true", "false"), want: "needs the right to list volumeattachments"},
	} {
		t.Run(name, func(t *testing.T) {
			answers, report := lostObjects(), lostReport(time.Now())
			if tc.change != nil {
				tc.change(answers, &report)
			}
			if r, err := planRecovery(t, answers, report, tc.copy); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %+v, %v, want an error that contains %q", r, err, tc.want)
			}
		})
	}
}

// TestOtherCommand: a move does not continue a recovery, and a recovery no move.
func TestOtherCommand(t *testing.T) {
	answers := objects()
	for recovery, want := range map[string]string{"": "kubectl trivet move -n ns data", `,\"recovery\":{\"claim\":\"c1\"}`: "kubectl trivet recover -n ns data"} {
		answers["/api/v1/namespaces/trivet-system/configmaps/trivet-move-u"] = `{"metadata":{"name":"trivet-move-u"},"data":{"state":"{\"id\":\"1\",\"namespace\":\"ns\",\"claim\":\"data\",\"uid\":\"u\",\"from\":\"a\",\"to\":\"b\",\"step\":\"swap\"` + recovery + `}"}}`
		m, err := move.New(t.Context(), connect(t, answers), move.Options{Namespace: "ns", ClaimName: "data", To: "b", Recover: recovery == ""})
		if err != nil {
			t.Fatal(err)
		}
		for name, err := range map[string]error{"continue": m.Resume(t.Context()), "abort": m.Abort(t.Context())} {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: got %v, want an error that contains %q", name, err, want)
			}
		}
	}
}
