package main

import (
	"fmt"
	"maps"
	"slices"
	"time"
)

// report prints the medians of the rounds, as Markdown.
func report(floor, volumes []round) {
	up := func(r round) time.Duration { return r.up }
	down := func(r round) time.Duration { return r.down }
	fmt.Println("| | up | down |")
	fmt.Println("|---|--:|--:|")
	fmt.Printf("| emptyDir | %s | %s |\n", seconds(median(floor, up)), seconds(median(floor, down)))
	fmt.Printf("| volumes | %s | %s |\n", seconds(median(volumes, up)), seconds(median(volumes, down)))
	fmt.Printf("| ratio | %.2f | %.2f |\n\n",
		float64(median(volumes, up))/float64(median(floor, up)), float64(median(volumes, down))/float64(median(floor, down)))

	fmt.Println("Where the time goes (means over the pods of the last round):")
	fmt.Println()
	fmt.Println("| from → to | time |")
	fmt.Println("|---|--:|")
	last := volumes[len(volumes)-1]
	for _, p := range last.phases {
		fmt.Printf("| %s | %s |\n", p.name, seconds(p.took))
	}
	if last.driver == nil {
		return
	}
	all := last.driver.total()
	fmt.Printf("\nThe driver's own share: %.0f ms of the %s of a volume's way, %.2f %%. All calls together took %s, %.1f %% of the round if no two had run at a time.\n\n",
		1000*all.Seconds()/float64(last.pods), seconds(last.way()), 100*all.Seconds()/float64(last.pods)/last.way().Seconds(),
		seconds(all), 100*all.Seconds()/(last.up+last.down).Seconds())
	fmt.Println("| call | times | together |")
	fmt.Println("|---|--:|--:|")
	for _, method := range slices.Sorted(maps.Keys(last.driver)) {
		s := last.driver[method]
		fmt.Printf("| %s | %d | %.0f ms |\n", method, s.calls, 1000*s.seconds)
	}
}

func median(rounds []round, of func(round) time.Duration) time.Duration {
	var all []time.Duration
	for _, r := range rounds {
		all = append(all, of(r))
	}
	slices.Sort(all)
	return all[len(all)/2]
}

func seconds(d time.Duration) string { return fmt.Sprintf("%.2f s", d.Seconds()) }
