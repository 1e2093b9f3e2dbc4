package chart

import (
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"

	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

const (
	examples      = "../../examples"
	exampleValues = examples + "/values"
)

// TestExamples checks that the objects in examples/ fit the types of the API, and that the driver accepts
// the parameters of the classes.
func TestExamples(t *testing.T) {
	err := filepath.WalkDir(examples, func(path string, _ fs.DirEntry, err error) error {
		if err != nil || filepath.Ext(path) != ".yaml" || filepath.Dir(path) == exampleValues {
			return err
		}
		t.Run(strings.TrimPrefix(path, examples+"/"), func(t *testing.T) {
			all := decode(t, read(t, path))
			if len(all.known)+len(all.foreign) == 0 {
				t.Error("got no objects, want at least one")
			}
			for _, c := range ofType[*storagev1.StorageClass](all) {
				checkClass(t, c)
			}
			checkSnapshotClasses(t, all)
		})
		return nil
	})
	must(t, err)
}

// checkClass fails unless the driver accepts the parameters and mount options of a class.
func checkClass(t *testing.T, c *storagev1.StorageClass) {
	t.Helper()
	p, err := volumeKinds.Parse(c.Parameters)
	if err == nil {
		err = volumeKinds.CheckCapabilities(volume.Spec{Parameters: p, Capabilities: []volume.Capability{{Mode: volume.SingleNodeWriter, MountFlags: c.MountOptions}}})
	}
	if err != nil {
		t.Errorf("StorageClass %s: %v", c.Name, err)
	}
}

// checkSnapshotClasses fails unless the driver accepts the parameters of the snapshot classes.
func checkSnapshotClasses(t *testing.T, all objects) {
	t.Helper()
	for _, kind := range []string{"VolumeSnapshotClass", "VolumeGroupSnapshotClass"} {
		for _, c := range decoded[snapshotClass](t, all, kind) {
			if _, err := volume.ParseSnapshotParameters(c.Parameters); err != nil {
				t.Errorf("%s %s: %v", kind, c.Metadata.Name, err)
			}
		}
	}
}

// TestExampleValues renders the chart with each file of examples/values. The objects must fit the types of
// the API, and the driver must accept its configuration and the classes.
func TestExampleValues(t *testing.T) {
	files, err := filepath.Glob(exampleValues + "/*")
	must(t, err)
	if len(files) == 0 {
		t.Fatalf("got no files in %s, want at least one", exampleValues)
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			values := read(t, file)
			if !strings.HasPrefix(values, "# For ") {
				t.Errorf("got first line %q, want a comment that says for whom the values are", strings.SplitN(values, "\n", 2)[0])
			}
			all := template(t, values, externalAPIs)
			checkSnapshotClasses(t, all)
			pools := poolKinds(t, all)
			for _, c := range ofType[*storagev1.StorageClass](all) {
				checkClass(t, c)
				kind, err := volumeKinds.Named(c.Parameters["backend"])
				must(t, err)
				if at := pools[c.Parameters["pool"]]; !slices.Contains(kind.Media, at) {
					t.Errorf("StorageClass %s: pool %q is a pool of kind %v, want one of %v", c.Name, c.Parameters["pool"], at, kind.Media)
				}
			}
			if n := len(ofType[*storagev1.StorageClass](all)); n < 2 {
				t.Errorf("got %d StorageClasses, want at least two", n)
			}
		})
	}
}

// poolKinds parses each configuration of the driver, and returns the kind of each pool.
func poolKinds(t *testing.T, all objects) map[string]pool.Kind {
	t.Helper()
	found := map[string]pool.Kind{}
	for _, m := range ofType[*corev1.ConfigMap](all) {
		if _, isConfig := m.Data["config.yaml"]; !isConfig {
			continue
		}
		for _, p := range parsed(t, all, m.Name).Pools {
			found[p.Name] = p.Kind()
		}
	}
	return found
}

// TestExamplesListed checks that the READMEs of the examples have a link to each file.
func TestExamplesListed(t *testing.T) {
	for dir, in := range map[string]string{".": ".", "values": ".", "volume-manager": "volume-manager"} {
		list := read(t, filepath.Join(examples, in, "README.md"))
		entries, err := os.ReadDir(filepath.Join(examples, dir))
		must(t, err)
		for _, e := range entries {
			name, err := filepath.Rel(in, filepath.Join(dir, e.Name()))
			must(t, err)
			if name != "README.md" && !strings.Contains(list, "]("+name) {
				t.Errorf("README.md in %s has no link to %s", filepath.Join(examples, in), name)
			}
		}
	}
}

// TestClassOfHelmTest checks that the claim of `helm test` has a class whose volumes are deleted with their
// claims, because each run would leave a volume of another class behind.
func TestClassOfHelmTest(t *testing.T) {
	const kept = "pools: {default: null, a: {directory: {path: /srv/a}, storageClasses: [{name: kept, reclaimPolicy: Retain}, {name: retained, backend: local, parameters: {onDelete: retain}}]}"
	for values, want := range map[string][]string{
		"": {"trivet-loop"},
		kept + ", b: {directory: {path: /srv/b}, storageClasses: [{name: b}]}}": {"b"},
		kept + "}":                 nil,
		"test: {enabled: false}\n": nil,
	} {
		var got []string
		for _, c := range ofType[*corev1.PersistentVolumeClaim](template(t, values)) {
			got = append(got, *c.Spec.StorageClassName)
		}
		if !slices.Equal(got, want) {
			t.Errorf("%q: got claims with the classes %q, want %q", values, got, want)
		}
	}
}
