//go:build e2e

package e2e

import (
	"flag"
	"fmt"
	"os"
	"testing"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

const (
	driverName = "csi.trivet.dev"
	namespace  = "trivet-system"
	manifests  = "../../deploy/trivet.yaml"
	chart      = "../../deploy/chart"
	// chartURL is the chart in the registry of the cluster.
	chartURL = "oci://127.0.0.1:5000/trivet-csi/charts/trivet"
	examples = "../../examples"
)

var (
	client kubernetes.Interface
	// clusterConfig is the configuration of client.
	clusterConfig *rest.Config
	pods          = flag.Int("pods", 100, "`number` of pods that TestKilled creates and deletes")
	killTime      = flag.Duration("kill", 5*time.Minute, "longest `time` for which TestKilled kills processes")
	moves         = flag.Int("moves", 10, "`number` of moves of TestMoveUnderLoad")
	moveSize      = flag.Int("move-size", 1, "size of the volume of TestMoveUnderLoad in `GiB`")
	moveData      = flag.Int("move-data", 0, "size of the files in this volume in `GiB`, or 0 for 90 % of it")
	moveAttach    = flag.Bool("move-attach", true, "attachRequired of the chart in TestMoveUnderLoad")
)

func TestMain(m *testing.M) {
	flag.Parse()
	// The tests drain nodes and kill kubelets, so they must not run in another cluster.
	if os.Getenv("TRIVET_E2E_STATE") == "" {
		fmt.Fprintln(os.Stderr, "these tests damage the cluster in which they run: start them with test/e2e/run, which creates a cluster")
		os.Exit(1)
	}
	config, err := clientcmd.BuildConfigFromFlags("", os.Getenv("KUBECONFIG"))
	if err == nil {
		config.QPS, config.Burst = 200, 400
		clusterConfig = config
		client, err = kubernetes.NewForConfig(config)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "connecting to the cluster of KUBECONFIG:", err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}
