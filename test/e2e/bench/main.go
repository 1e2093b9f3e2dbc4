// Command bench measures volumes in a Kubernetes cluster: how long it takes until many pods with a claim each
// are ready, and until they are deleted with their volumes. It compares them with as many pods with an
// emptyDir, in turns, and shows in which phases the time is spent.
//
// It needs a cluster (KUBECONFIG) with Trivet. test/e2e/run creates one and starts the command.
package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"os"
	"os/signal"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
)

func main() {
	pods := flag.Int("pods", 60, "`number` of pods in a round")
	rounds := flag.Int("rounds", 3, "`number` of rounds with claims, and of rounds with emptyDirs, in turns")
	class := flag.String("class", "trivet-loop", "`name` of the StorageClass of the claims")
	metrics := flag.String("metrics", "", "comma-separated `URLs` of the metrics of the nodes' drivers")
	flag.Parse()
	if err := bench(*pods, *rounds, *class, *metrics); err != nil {
		log.Fatal(err)
	}
}

// bench runs the rounds and prints the report.
func bench(pods, rounds int, class, metrics string) error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	config, err := clientcmd.BuildConfigFromFlags("", os.Getenv("KUBECONFIG"))
	if err != nil {
		return err
	}
	config.QPS, config.Burst = 1000, 2000
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	var emptyDirs, volumes []round
	for i := range rounds {
		for _, kind := range []struct {
			suffix, class string // of the namespace, and of the claims
			into          *[]round
		}{{"", "", &emptyDirs}, {"-volumes", class, &volumes}} {
			r, err := runRound(ctx, client, fmt.Sprintf("bench-%d%s", i, kind.suffix), pods, kind.class, metrics)
			if err != nil {
				return err
			}
			*kind.into = append(*kind.into, r)
			time.Sleep(2 * time.Second) // so that the end of a round does not overlap the next one
		}
	}
	report(emptyDirs, volumes)
	return nil
}
