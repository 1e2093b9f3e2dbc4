package kubectl

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"time"

	"github.com/trivet-csi/trivet/cluster/kube"
	"github.com/trivet-csi/trivet/cluster/status"
)

// Volume is a volume with the objects of Kubernetes that belong to it.
type Volume struct {
	status.Volume
	// PersistentVolume is empty for a volume that has none.
	PersistentVolume string `json:"persistentVolume,omitempty"`
	StorageClass     string `json:"storageClass,omitempty"`
	// Pods are the pods that use the claim, as namespace/name.
	Pods      []string `json:"pods,omitempty"`
	Snapshots int      `json:"snapshots"`
}

// PageReport returns the report for the status page, with claims if the user may list PersistentVolumes. An error is a
// problem in the report.
func (c *Cluster) PageReport(ctx context.Context) status.Report {
	r, err := c.Report(ctx)
	if err != nil {
		return status.Report{Time: time.Now(), Processes: []status.Process{{Problem: err.Error()}}}
	}
	ctx, cancel := context.WithTimeout(ctx, reportTimeout)
	defer cancel()
	if volumes, err := c.PersistentVolumes(ctx, r.Driver); err == nil {
		addClaims(r.Volumes, volumes)
	}
	return r
}

// Volumes joins the volumes of a report with PersistentVolumes, claims and pods.
func (c *Cluster) Volumes(ctx context.Context, r status.Report) ([]Volume, error) {
	volumes, err := c.PersistentVolumes(ctx, r.Driver)
	if err != nil {
		return nil, needs(err, "list persistentvolumes")
	}
	pods, err := c.Pods(ctx, "", "")
	if err != nil {
		return nil, needs(err, "list pods in all namespaces")
	}
	return join(r, volumes, pods), nil
}

func join(r status.Report, persistent []kube.PersistentVolume, pods []kube.Pod) []Volume {
	byHandle := addClaims(r.Volumes, persistent)
	users := usersByClaim(pods)
	snapshots := r.SnapshotCounts()
	joined := make([]Volume, 0, len(r.Volumes))
	for _, v := range r.Volumes {
		own := Volume{Volume: v, Snapshots: snapshots[v.ID]}
		if v.Pod != "" {
			own.Pods = []string{v.Pod}
		}
		if p, ok := byHandle[v.ID]; ok && v.ID != "" {
			own.PersistentVolume, own.StorageClass = p.Metadata.Name, p.Spec.StorageClassName
			if own.Phase != "Released" { // otherwise another claim of that name may exist
				own.Pods = users[own.Claim]
			}
		}
		joined = append(joined, own)
	}
	slices.SortStableFunc(joined, func(a, b Volume) int {
		return strings.Compare(cmp.Or(a.Claim, a.Name), cmp.Or(b.Claim, b.Name))
	})
	return joined
}

// addClaims adds their claims to volumes. It returns the PersistentVolumes by the IDs of their volumes.
func addClaims(volumes []status.Volume, persistent []kube.PersistentVolume) map[string]kube.PersistentVolume {
	byHandle := map[string]kube.PersistentVolume{}
	for _, p := range persistent {
		byHandle[p.Spec.CSI.VolumeHandle] = p
	}
	for i, v := range volumes {
		p, ok := byHandle[v.ID]
		if !ok || v.ID == "" {
			continue
		}
		volumes[i].Phase = p.Status.Phase
		if ref := p.Spec.ClaimRef; ref.Name != "" {
			volumes[i].Claim = ref.Namespace + "/" + ref.Name
		}
	}
	return byHandle
}

// usersByClaim returns the pods that use each claim. Both are namespace/name. A completed pod uses no claim.
func usersByClaim(pods []kube.Pod) map[string][]string {
	users := map[string][]string{}
	for _, p := range pods {
		if p.Status.Phase == "Succeeded" || p.Status.Phase == "Failed" {
			continue
		}
		for _, v := range p.Spec.Volumes {
			if claim := v.ClaimName(p.Metadata.Name); claim != "" {
				key := p.Metadata.Namespace + "/" + claim
				users[key] = append(users[key], p.Metadata.Namespace+"/"+p.Metadata.Name)
			}
		}
	}
	return users
}
