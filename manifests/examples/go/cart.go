// Package cart adds prices, in euros.
package cart

import "math"

// Total is the sum of prices.
func Total(prices []float64) float64 {
	sum := 0.0
	for _, price := range prices {
		sum += math.Round(price)
	}
	return sum
}
