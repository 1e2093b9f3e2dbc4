package chart

import (
	"encoding/base64"
	"maps"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"

	"github.com/trivet-csi/trivet/volume"
)

// snapshotClass is what VolumeSnapshotClass and VolumeGroupSnapshotClass have.
type snapshotClass struct {
	Metadata struct {
		Name        string
		Annotations map[string]string
	}
	Driver         string
	DeletionPolicy string `yaml:"deletionPolicy"`
	Parameters     map[string]string
}

// decoded are the objects of a kind of another project.
func decoded[T any](t *testing.T, all objects, kind string) (found []T) {
	t.Helper()
	for _, text := range all.foreign {
		var one T
		if !strings.Contains(text, "kind: "+kind+"\n") {
			continue
		}
		if err := yaml.Unmarshal([]byte(text), &one); err != nil {
			t.Fatal(err)
		}
		found = append(found, one)
	}
	return found
}

// TestSnapshotClasses: each class is one of groups too, if there are any, and the driver
// takes its parameters.
func TestSnapshotClasses(t *testing.T) {
	for kind, isDefault := range map[string]string{
		"VolumeSnapshotClass":      "snapshot.storage.kubernetes.io/is-default-class",
		"VolumeGroupSnapshotClass": "groupsnapshot.storage.kubernetes.io/is-default-class",
	} {
		classes := decoded[snapshotClass](t, template(t, everything, theirAPIs), kind)
		if len(classes) != 2 || classes[0].Metadata.Name != "often" || classes[1].Metadata.Name != "kept" {
			t.Fatalf("%s: %+v", kind, classes)
		}
		often, kept := classes[0], classes[1]
		if often.Metadata.Annotations[isDefault] != "true" || often.Metadata.Annotations["note"] != "x" || len(kept.Metadata.Annotations) != 0 {
			t.Errorf("%s: annotations %v, %v", kind, often.Metadata.Annotations, kept.Metadata.Annotations)
		}
		if often.Driver != "storage.example.com" || often.DeletionPolicy != "Delete" || kept.DeletionPolicy != "Retain" {
			t.Errorf("%s: %+v, %+v", kind, often, kept)
		}
		for class, want := range map[*snapshotClass]volume.Consistency{&often: volume.ConsistencyCrash, &kept: volume.ConsistencyFrozen} {
			if p, err := volume.ParseSnapshotParameters(class.Parameters); err != nil || p.Consistency != want {
				t.Errorf("%s: the driver reads %v, %v of %v", kind, p, err, class.Parameters)
			}
		}
	}
}

// TestSnapshotsAsTheyAre: without groups and metadata there is nothing of them, and
// without snapshots nothing at all.
func TestSnapshotsAsTheyAre(t *testing.T) {
	for values, want := range map[string][]string{"": nil, "snapshots: {enabled: true}": {"VolumeSnapshotClass"}} {
		all := template(t, values, theirAPIs)
		var kinds []string
		for _, text := range all.foreign {
			_, kind, _ := strings.Cut(text, "kind: ")
			kind, _, _ = strings.Cut(kind, "\n")
			kinds = append(kinds, kind)
		}
		if !slices.Equal(kinds, want) {
			t.Errorf("%q: %q, want %q", values, kinds, want)
		}
		allowed := slices.Collect(maps.Keys(writes(t, all, "trivet-controller")))
		for _, resource := range []string{"volumegroupsnapshotcontents", "tokenreviews", "subjectaccessreviews"} {
			if slices.Contains(allowed, resource) {
				t.Errorf("%q: there is a right to %s", values, resource)
			}
		}
	}
}

// TestSnapshotMetadata: backup programs find the sidecar by what the driver's name says,
// and get to it in both shapes.
func TestSnapshotMetadata(t *testing.T) {
	for pod, values := range map[string]string{"trivet-controller": everything, "trivet": oneNode + everything} {
		all := template(t, values, theirAPIs)
		services := decoded[struct {
			Metadata struct{ Name string }
			Spec     struct {
				Address, Audience string
				CACert            string `yaml:"caCert"`
			}
		}](t, all, "SnapshotMetadataService")
		if len(services) != 1 || services[0].Metadata.Name != "storage.example.com" || services[0].Spec.Address != "trivet-snapshot-metadata.trivet-system:443" {
			t.Fatalf("%s: %+v", pod, services)
		}
		if services[0].Spec.Audience != "storage.example.com" {
			t.Errorf("%s: audience %q", pod, services[0].Spec.Audience)
		}
		if ca, err := base64.StdEncoding.DecodeString(services[0].Spec.CACert); err != nil || !strings.HasPrefix(string(ca), "-----BEGIN CERTIFICATE-----\n") {
			t.Errorf("%s: CA %q, %v", pod, ca, err)
		}
		sidecar := container(pods(all)[pod], "csi-snapshot-metadata")
		for _, flag := range []string{"--port=9812", "--tls-cert=/tls/tls.crt", "--tls-key=/tls/tls.key"} {
			if !slices.Contains(sidecar.Args, flag) {
				t.Errorf("%s: no %s in %q", pod, flag, sidecar.Args)
			}
		}
		service := named[*corev1.Service](t, all, "trivet-snapshot-metadata")
		target := service.Spec.Ports[0]
		if target.Port != 443 || !slices.Contains(sidecar.Ports, corev1.ContainerPort{Name: target.TargetPort.StrVal, ContainerPort: 9812, Protocol: corev1.ProtocolTCP}) {
			t.Errorf("%s: service %v, ports %v", pod, target, sidecar.Ports)
		}
		if !selects(service.Spec.Selector, pods(all)[pod]) {
			t.Errorf("%s: the service is of %v", pod, service.Spec.Selector)
		}
		policy := named[*networkingv1.NetworkPolicy](t, all, pod)
		if from, open := ports(policy.Spec.Ingress)[target.TargetPort.StrVal]; !open || len(from) != 0 {
			t.Errorf("%s: open %t, to %v", pod, open, from)
		}
	}
}

// TestMissingSnapshotAPIs: what the cluster lacks is named.
func TestMissingSnapshotAPIs(t *testing.T) {
	const metadata = `{enabled: true, metadata: {enabled: true, secretName: a, caCert: "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----"}}`
	for values, api := range map[string]string{
		"snapshots: {enabled: true, groups: true}": "groupsnapshot.storage.k8s.io/v1",
		"snapshots: " + metadata:                   "cbt.storage.k8s.io/v1beta1",
	} {
		_, stderr, ok := tryTemplate(t, values, "--api-versions=snapshot.storage.k8s.io/v1")
		if ok || !strings.Contains(stderr, "the cluster has no API "+api) {
			t.Errorf("%s: accepted: %t\n%s", values, ok, stderr)
		}
	}
}
