// Package chart tests the Helm chart in deploy/chart with the version of helm that tools/go.mod pins. It
// needs no cluster. test/e2e tests installations in a cluster.
package chart

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/kubernetes/scheme"
)

const (
	chart     = "../../deploy/chart"
	manifests = "../../deploy/trivet.yaml"
	release   = "trivet"
	namespace = "trivet-system"
)

// helm is the path of the pinned helm. environ is its environment, which hides the user's configuration
// and cluster.
var (
	helm    string
	environ []string
)

func TestMain(m *testing.M) {
	code, err := run(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	os.Exit(code)
}

// run builds helm and runs the tests.
func run(m *testing.M) (code int, err error) {
	home, err := os.MkdirTemp("", "trivet-chart-")
	if err != nil {
		return 1, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(home)) }()
	// GOGC=off, because the tests start helm hundreds of times, and each process needs little memory.
	environ = append(os.Environ(), "KUBECONFIG=/dev/null", "GOGC=off",
		"HELM_CACHE_HOME="+home, "HELM_CONFIG_HOME="+home, "HELM_DATA_HOME="+home)
	// With -n, go tool builds helm in Go's build cache and prints its path instead of running it.
	tool := exec.Command("go", "tool", "-modfile=../../tools/go.mod", "-n", "helm")
	tool.Stderr = os.Stderr
	out, err := tool.Output()
	if err != nil {
		return 1, fmt.Errorf("building the helm of tools/go.mod: %w", err)
	}
	helm = strings.TrimSpace(string(out))
	return m.Run(), nil
}

// tryHelm runs helm and returns its output. ok reports whether it succeeded.
func tryHelm(t *testing.T, args ...string) (stdout, stderr string, ok bool) {
	t.Helper()
	var o, e bytes.Buffer
	cmd := exec.CommandContext(t.Context(), helm, args...)
	cmd.Env, cmd.Stdout, cmd.Stderr = environ, &o, &e
	err := cmd.Run()
	var failed *exec.ExitError
	if err != nil && !errors.As(err, &failed) {
		t.Fatal(err)
	}
	return o.String(), e.String(), err == nil
}

// tryTemplate renders the chart with values in YAML. ok reports whether helm succeeded.
func tryTemplate(t *testing.T, values string, args ...string) (stdout, stderr string, ok bool) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "values.yaml")
	must(t, os.WriteFile(file, []byte(values), 0o600))
	return tryHelm(t, append([]string{"template", release, chart, "--namespace", namespace, "--values", file}, args...)...)
}

// checkMessage renders the chart, and fails unless the error contains all texts. If texts is empty, the
// chart must be rendered without an error.
func checkMessage(t *testing.T, values string, texts []string, args ...string) {
	t.Helper()
	_, stderr, ok := tryTemplate(t, values, args...)
	if ok != (len(texts) == 0) {
		t.Errorf("%s: got success: %t, want %t\n%s", values, ok, len(texts) == 0, stderr)
	}
	for _, text := range texts {
		if !strings.Contains(stderr, text) {
			t.Errorf("%s: got error without %q:\n%s", values, text, stderr)
		}
	}
}

// template renders the chart and returns its objects.
func template(t *testing.T, values string, args ...string) objects {
	t.Helper()
	stdout, stderr, ok := tryTemplate(t, values, args...)
	if !ok {
		t.Fatalf("rendering with values:\n%s\n%s", values, stderr)
	}
	return decode(t, stdout)
}

// foreign contains the APIs of other projects, for whose objects the tests have no types.
var foreign = []string{
	"apiVersion: snapshot.storage.k8s.io/", "apiVersion: groupsnapshot.storage.k8s.io/", "apiVersion: cbt.storage.k8s.io/",
	"apiVersion: monitoring.coreos.com/", "apiVersion: cert-manager.io/",
}

// objects contains decoded objects, and the YAML of objects of foreign APIs.
type objects struct {
	known   []runtime.Object
	foreign []string
}

// decode decodes manifests to the types of the Kubernetes API. Unknown and duplicate fields, and values
// of a wrong type, fail the test.
func decode(t *testing.T, manifests string) (all objects) {
	t.Helper()
	decoder := serializer.NewCodecFactory(scheme.Scheme, serializer.EnableStrict).UniversalDeserializer()
next:
	for _, doc := range strings.Split("\n"+manifests, "\n---") {
		if !strings.Contains(doc, "apiVersion:") {
			continue
		}
		for _, api := range foreign {
			if strings.Contains(doc, api) {
				all.foreign = append(all.foreign, doc)
				continue next
			}
		}
		object, _, err := decoder.Decode([]byte(doc), nil, nil)
		if err != nil {
			t.Errorf("%v in\n%s", err, doc)
			continue
		}
		all.known = append(all.known, object)
	}
	return all
}

// ofType returns the objects of a type.
func ofType[T runtime.Object](all objects) (found []T) {
	for _, o := range all.known {
		if typed, ok := o.(T); ok {
			found = append(found, typed)
		}
	}
	return found
}

// one returns the object of a type. The test fails unless there is exactly one.
func one[T runtime.Object](t *testing.T, all objects) T {
	t.Helper()
	found := ofType[T](all)
	if len(found) != 1 {
		t.Fatalf("got %d objects of type %T, want one", len(found), found)
	}
	return found[0]
}

// named returns the object of a type with a name.
func named[T interface {
	runtime.Object
	metav1.Object
}](t *testing.T, all objects, name string) (found T) {
	t.Helper()
	for _, o := range ofType[T](all) {
		if o.GetName() == name {
			return o
		}
	}
	t.Fatalf("got no %T with the name %s", found, name)
	return found
}

// pods returns the pod templates of the DaemonSets and Deployments, by the name of the workload.
func pods(all objects) map[string]corev1.PodTemplateSpec {
	found := map[string]corev1.PodTemplateSpec{}
	for _, o := range all.known {
		switch workload := o.(type) {
		case *appsv1.DaemonSet:
			found[workload.Name] = workload.Spec.Template
		case *appsv1.Deployment:
			found[workload.Name] = workload.Spec.Template
		}
	}
	return found
}

// container returns the container with a name, or nil if the pod has none.
func container(pod corev1.PodTemplateSpec, name string) *corev1.Container {
	for i, c := range pod.Spec.Containers {
		if c.Name == name {
			return &pod.Spec.Containers[i]
		}
	}
	return nil
}

// names returns the names of the pod's containers in order.
func names(pod corev1.PodTemplateSpec) (all []string) {
	for _, c := range pod.Spec.Containers {
		all = append(all, c.Name)
	}
	return all
}

func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}
