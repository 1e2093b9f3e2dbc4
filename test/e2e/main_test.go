//go:build e2e

package e2e

import (
	"flag"
	"fmt"
	"os"
	"testing"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

const (
	driverName = "csi.trivet.dev"
	namespace  = "trivet-system"
	manifests  = "../../deploy/trivet.yaml"
	chart      = "../../deploy/chart"
	examples   = "../../examples"
)

var (
	client kubernetes.Interface
	// clusterConfig is how client gets to the cluster.
	clusterConfig *rest.Config
	pods          = flag.Int("pods", 100, "how many pods TestKilled creates and deletes")
)

func TestMain(m *testing.M) {
	flag.Parse()
	// The tests drain nodes and kill kubelets, so they need a cluster of their own.
	if os.Getenv("TRIVET_E2E_STATE") == "" {
		fmt.Fprintln(os.Stderr, "these tests damage the cluster that they run in: start them with test/e2e/run, which creates one")
		os.Exit(1)
	}
	config, err := clientcmd.BuildConfigFromFlags("", os.Getenv("KUBECONFIG"))
	if err == nil {
		config.QPS, config.Burst = 200, 400
		clusterConfig = config
		client, err = kubernetes.NewForConfig(config)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "no cluster:", err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}
